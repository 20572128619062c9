{{/* Most take a dict: root (the chart's context), name and model (as pagoda.model gives it), component, worker. */}}

{{/* All models; none given is the embedded one. */}}
{{- define "pagoda.models" -}}
{{- $models := dict }}
{{- range $name, $given := .Values.models }}
{{- if $given }}{{ $_ := set $models $name $given }}{{ end }}
{{- end }}
{{- $models | default (dict "tiny" (dict "model" "pagoda-tiny")) | toYaml }}
{{- end }}

{{/* A model with all that follows from its values. Takes root, name and given. */}}
{{- define "pagoda.model" -}}
{{- $at := printf "models.%s" .name }}
{{- $given := .given }}
{{- $weights := $given.weights | default dict }}
{{- $volumes := list }}
{{- range $each := list "claim" "size" "perPod" "hostPath" "image" }}
{{- if get $weights $each }}{{ $volumes = append $volumes $each }}{{ end }}
{{- end }}
{{- if gt (len $volumes) 1 }}
{{- fail (printf "%s.weights has %s, must have one of them" $at (join " and " $volumes)) }}
{{- end }}
{{- $volume := first $volumes | default "" }}
{{- $isShared := has $volume (list "claim" "size") }}
{{- if and $weights.source (has $volume (list "" "image")) }}
{{- fail (printf "%s.weights.source needs claim, size, perPod or hostPath: where it is fetched to" $at) }}
{{- end }}
{{- if and $weights.source $weights.path }}
{{- fail (printf "%s.weights has source and path, must have one of them" $at) }}
{{- end }}
{{- if and $weights.path (has $volume (list "" "perPod")) }}
{{- fail (printf "%s.weights.path needs claim, size, hostPath or image: what it is a directory of" $at) }}
{{- end }}
{{- if and (eq ($weights.download | default "init") "job") (not (and $isShared $weights.source)) }}
{{- fail (printf "%s.weights.download is job, needs source, and claim or size: a volume of all pods" $at) }}
{{- end }}
{{- $location := $given.model }}
{{- if $weights.source }}
{{- $digest := printf "%s@%s" $weights.source ($weights.revision | default "") | sha256sum | trunc 8 }}
{{- $location = printf "/models/%s-%s" .name $digest }}
{{- else if eq $volume "image" }}
{{- $location = printf "/mnt/models/%s" ($weights.path | default "") | trimSuffix "/" }}
{{- else if $weights.path }}
{{- $location = printf "/models/%s" $weights.path }}
{{- end }}
{{- $sets := dict }}
{{- range $set, $own := $given.workers }}
{{- if $own }}{{ $_ := set $sets $set $own }}{{ end }}
{{- end }}
{{- $sets = $sets | default (dict "main" dict) }}
{{- $workers := dict }}
{{- $mostRanks := 1 }}
{{- $mostNodes := 1 }}
{{- $devices := 0 }}
{{- range $index, $set := keys $sets | sortAlpha }}
{{- $own := get $sets $set }}
{{- $gpus := int ($own.gpus | default 0) }}
{{- $ranks := int ($own.tensorParallelSize | default (max $gpus 1)) }}
{{- $nodes := int ($own.nodes | default 1) }}
{{- if and (gt $gpus 0) (ne $gpus $ranks) }}
{{- fail (printf "%s.workers.%s.tensorParallelSize is %d, must be gpus, %d: each rank has one" $at $set $ranks $gpus) }}
{{- end }}
{{- if and (gt $nodes 1) (eq $volume "perPod") }}
{{- fail (printf "%s.workers.%s.nodes is %d, must be 1 with weights.perPod" $at $set $nodes) }}
{{- end }}
{{- $mostRanks = max $mostRanks $ranks }}
{{- $mostNodes = max $mostNodes $nodes }}
{{- if gt $gpus 0 }}{{ $devices = add1 $devices }}{{ end }}
{{- $replicas := ternary $own.replicas 1 (hasKey $own "replicas") }}
{{- $numbers := ternary "" (printf "%d000" (add1 $index)) (eq (len $sets) 1) }}
{{- $suffix := ternary "" (printf "-%s" $set) (eq $set "main") }}
{{- $counts := dict "gpus" $gpus "ranks" $ranks "nodes" $nodes "replicas" $replicas }}
{{- $_ := set $workers $set (merge (dict "set" $set "numbers" $numbers "suffix" $suffix) $counts $own) }}
{{- end }}
{{- $derived := dict "weights" $weights "volume" $volume "isShared" $isShared "location" $location "workers" $workers }}
{{- $_ := set $derived "isEmbedded" (eq $given.model "pagoda-tiny") }}
{{- $_ := set $derived "isNamed" (ne $location $given.model) }}
{{- $_ := set $derived "isOnDevices" (eq $devices (len $sets)) }}
{{- $_ := set $derived "ranks" $mostRanks }}
{{- $_ := set $derived "nodes" $mostNodes }}
{{- $_ := set $derived "frontends" ($given.frontends | default dict) }}
{{- $_ := set $derived "hasShared" (eq ($derived.frontends.shared | default false) true) }}
{{- if and $derived.hasShared (gt (len $derived.frontends) 1) }}
{{- fail (printf "%s.frontends has shared, and more: that is said in sharedFrontends" $at) }}
{{- end }}
{{- $_ := set $derived "scheduler" ($given.scheduler | default dict) }}
{{- $_ := set $derived "settings" ($given.settings | default dict) }}
{{- $_ := set $derived "model" $given.model }}
{{- toYaml $derived }}
{{- end }}

{{/* What frontends are there, by name: of one model each, and `shared`, with all models that share them. */}}
{{- define "pagoda.frontends" -}}
{{- $units := dict }}
{{- $shared := dict }}
{{- $names := dict }}
{{- range $name, $given := include "pagoda.models" . | fromYaml }}
{{- $model := include "pagoda.model" (dict "root" $ "name" $name "given" $given) | fromYaml }}
{{- if $model.hasShared }}
{{- $_ := set $shared $name $model }}
{{- range include "pagoda.clientNames" $model | fromJsonArray }}
{{- if hasKey $names . }}
{{- fail (printf "models.%s and models.%s share frontends, and clients call both %s" (get $names .) $name .) }}
{{- end }}
{{- $_ := set $names . $name }}
{{- end }}
{{- else }}
{{- $_ := set $units $name (dict "model" $model) }}
{{- end }}
{{- end }}
{{- if $shared }}
{{- if hasKey $units "shared" }}
{{- fail "models.shared has the name of the shared frontends, must have another one" }}
{{- end }}
{{- $own := .Values.sharedFrontends | default dict }}
{{- $isEmbedded := true }}
{{- range $shared }}{{ $isEmbedded = and $isEmbedded .isEmbedded }}{{ end }}
{{- $settings := $own.settings | default dict }}
{{- $model := dict "frontends" (omit $own "settings") "settings" $settings "isEmbedded" $isEmbedded "weights" dict "volume" "" }}
{{- $_ := set $units "shared" (dict "model" $model "models" $shared) }}
{{- end }}
{{- toYaml $units }}
{{- end }}

{{/* What clients call a model, in JSON. Takes the model. */}}
{{- define "pagoda.clientNames" -}}
{{- $given := get .settings "SERVED_MODEL_NAME" | default "" | toString }}
{{- if $given }}{{ splitList "," $given | toJson }}{{ else }}{{ list .model | toJson }}{{ end }}
{{- end }}

{{/* The entries of --models of shared frontends. Settings that a model may have for itself are in its entry. */}}
{{- define "pagoda.entries" -}}
{{- $switches := list "enable_auto_tool_choice" "enable_long_inputs" "trust_request_chat_template" }}
{{- $texts := list "chat_template" "tool_call_parser" "tool_parser_plugin" "reasoning_parser" "reasoning_parser_plugin" }}
{{- $texts = concat $texts (list "generation_config" "override_generation_config" "structured_outputs_config" "revision" "tokenizer") }}
{{- $entries := list }}
{{- range $name, $model := .models }}
{{- $of := dict "root" $.root "name" $name "model" $model "component" "frontend" "isShared" true }}
{{- $names := include "pagoda.clientNames" $model | fromJsonArray }}
{{- $entry := dict "name" (first $names) "scheduler" (printf "%s-scheduler:50052" (include "pagoda.name" $of)) }}
{{- with rest $names }}{{ $_ := set $entry "aliases" . }}{{ end }}
{{- $_ := set $entry "model" (include "pagoda.location" $of) }}
{{- range $key, $value := $model.settings }}
{{- $key = lower $key }}
{{- if has $key $switches }}
{{- $_ := set $entry $key (eq (toString $value | lower) "true") }}
{{- else if has $key $texts }}
{{- $_ := set $entry $key (toString $value) }}
{{- else if eq $key "max_logprobs" }}
{{- $_ := set $entry $key (int $value) }}
{{- end }}
{{- end }}
{{- $entries = append $entries $entry }}
{{- end }}
{{- toJson $entries }}
{{- end }}

{{/* Where the volume of checkpoints is, and the checkpoint. Shared frontends have a directory for each model. */}}
{{- define "pagoda.folder" -}}
{{ if .isShared }}/shared/{{ .name }}{{ else }}/models{{ end }}
{{- end }}

{{- define "pagoda.imageFolder" -}}
{{ if .isShared }}/mnt/{{ .name }}{{ else }}/mnt/models{{ end }}
{{- end }}

{{- define "pagoda.location" -}}
{{- $location := .model.location }}
{{- if not .model.isNamed }}{{ $location }}
{{- else if eq .model.volume "image" }}{{ include "pagoda.imageFolder" . }}{{ trimPrefix "/mnt/models" $location }}
{{- else }}{{ include "pagoda.folder" . }}{{ trimPrefix "/models" $location }}
{{- end }}
{{- end }}

{{/* What a container asks for when the model does not say. Takes kind: frontend, scheduler, worker or gpuWorker. */}}
{{- define "pagoda.resources" -}}
{{- $resources := .root.Values.resources }}
{{- $usual := get $resources.others .kind }}
{{- if .model.isEmbedded }}{{ $usual = get $resources.embedded .kind | default $resources.embedded.worker }}{{ end }}
{{- .own | default $usual | toYaml }}
{{- end }}

{{- define "pagoda.name" -}}
{{ printf "%s-%s" (.root.Release.Name | trunc 16 | trimSuffix "-") .name }}
{{- end }}

{{- define "pagoda.selector" -}}
app.kubernetes.io/name: pagoda
app.kubernetes.io/instance: {{ .root.Release.Name }}
pagoda/model: {{ .name }}
app.kubernetes.io/component: {{ .component }}
{{- with .worker }}
pagoda/workers: {{ .set }}
{{- end }}
{{- end }}

{{- define "pagoda.labels" -}}
{{ include "pagoda.selector" . }}
app.kubernetes.io/part-of: pagoda
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* The same of what belongs to no model. */}}
{{- define "pagoda.common" -}}
app.kubernetes.io/name: pagoda
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: pagoda
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "pagoda.release" -}}
{{ printf "%s-pagoda" (.Release.Name | trunc 40 | trimSuffix "-") }}
{{- end }}

{{/* "true" with mutual TLS. */}}
{{- define "pagoda.tls" -}}
{{- $tls := .Values.tls }}
{{- if or $tls.frontend $tls.scheduler $tls.worker }}
{{- if not (and $tls.frontend $tls.scheduler $tls.worker) }}
{{- fail "tls needs frontend, scheduler and worker, or none: without a certificate a service reaches no other" }}
{{- end }}true
{{- end }}
{{- end }}

{{- define "pagoda.settings" -}}
PAGODA_LOG_LEVEL: info
{{- if .models }}
PAGODA_MODELS: {{ include "pagoda.entries" . | quote }}
{{- else }}
PAGODA_MODEL: {{ .model.location | quote }}
{{- if .model.isNamed }}
PAGODA_SERVED_MODEL_NAME: {{ .model.model | quote }}
{{- end }}
PAGODA_SCHEDULER: {{ printf "%s-scheduler:50052" (include "pagoda.name" .) | quote }}
{{- end }}
{{- if include "pagoda.tls" .root }}
PAGODA_INSECURE: "false"
PAGODA_TLS_CERT: /etc/pagoda/tls/tls.crt
PAGODA_TLS_KEY: /etc/pagoda/tls/tls.key
PAGODA_TLS_CA: /etc/pagoda/tls/ca.crt
{{- else }}
PAGODA_INSECURE: "true"
{{- end }}
{{- if .model.isOnDevices }}
PAGODA_DEVICE: cuda
{{- end }}
{{- if .root.Values.entry.kind }}
PAGODA_ROOT_PATH: /{{ .name }}
{{- end }}
{{- end }}

{{/* With the model's own before them. */}}
{{- define "pagoda.data" -}}
{{- $own := dict }}
{{- range $key, $value := .model.settings }}
{{- $_ := set $own (printf "PAGODA_%s" $key) (toString $value) }}
{{- end }}
{{- merge $own (include "pagoda.settings" . | fromYaml) | toYaml }}
{{- end }}

{{/* What others make. */}}
{{- define "pagoda.external" -}}
{{- $values := .root.Values }}
{{- $found := list }}
{{- with get $values.tls .component }}{{ $found = append $found (printf "secret/%s" .) }}{{ end }}
{{- with $values.secrets.serviceToken }}{{ $found = append $found (printf "secret/%s" .) }}{{ end }}
{{- if eq .component "frontend" }}
{{- with $values.secrets.apiKeys }}{{ $found = append $found (printf "secret/%s" .) }}{{ end }}
{{- with $values.secrets.operatorKeys }}{{ $found = append $found (printf "secret/%s" .) }}{{ end }}
{{- end }}
{{- range $name, $model := .models }}
{{- with $model.weights.secret }}{{ $found = append $found (printf "secret/%s" .) }}{{ end }}
{{- if and $model.isNamed (not $model.weights.source) }}
{{- with $model.weights.claim }}{{ $found = append $found (printf "persistentvolumeclaim/%s" .) }}{{ end }}
{{- end }}
{{- end }}
{{- if ne .component "scheduler" }}
{{- with .model.weights.secret }}{{ $found = append $found (printf "secret/%s" .) }}{{ end }}
{{- with .model.weights.claim }}{{ $found = append $found (printf "persistentvolumeclaim/%s" .) }}{{ end }}
{{- end }}
{{- with $found -}}
annotations:
  pagoda/external: {{ join " " (uniq .) | quote }}
{{- end }}
{{- end }}

{{/* A change of settings rolls the pods of that model. */}}
{{- define "pagoda.annotations" -}}
pagoda/settings: {{ include "pagoda.data" . | sha256sum | trunc 16 | quote }}
{{- end }}

{{/* What all pods have: who they are, and that they may do nothing. */}}
{{- define "pagoda.pod" -}}
serviceAccountName: {{ include "pagoda.release" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.priorityClass.name }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "pagoda.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "pagoda.selector" . | nindent 8 }}
{{- end }}

{{- define "pagoda.restricted" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "pagoda.container" -}}
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
envFrom:
  - configMapRef:
      name: {{ include "pagoda.name" . }}
{{ include "pagoda.restricted" . }}
{{- end }}

{{- define "pagoda.env" -}}
- name: HOME
  value: /tmp
{{- if and (ne .component "scheduler") .root.Values.secrets.hub }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.secrets.hub }}
      key: token
      optional: true
{{- end }}
{{- if and (ne .component "scheduler") (not .model.isEmbedded) }}
- name: HF_HOME
  value: /models/hub
{{- end }}
{{- with .root.Values.secrets.serviceToken }}
- name: PAGODA_SERVICE_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{- if include "pagoda.tls" .root }}
# Pods are called by addresses, and schedulers by names of their models: neither is in a certificate.
- name: PAGODA_TLS_SERVER_NAME
  value: {{ eq .component "scheduler" | ternary .root.Values.tls.workerName .root.Values.tls.schedulerName }}
{{- end }}
{{- end }}

{{/* Whether a pod has the volume of checkpoints, what it is, and where it is. */}}
{{- define "pagoda.models.volume" -}}
{{- if and (ne .component "scheduler") (not .model.isEmbedded) }}
{{- $weights := .model.weights }}
{{- $isLocal := and (eq .component "frontend") (has .model.volume (list "perPod" "hostPath")) }}
{{- if and .isShared $weights.source }}{{ $isLocal = true }}{{ end }}
{{- $suffix := ternary (printf "-%s" .name) "" (eq (.isShared | default false) true) }}
{{- if or (eq .model.volume "") $isLocal }}
- name: models{{ $suffix }}
  emptyDir: {}
{{- else if eq .model.volume "hostPath" }}
- name: models{{ $suffix }}
  hostPath:
    path: {{ $weights.hostPath }}
    type: Directory
{{- else if eq .model.volume "image" }}
{{- if not .isShared }}
- name: models
  emptyDir: {}
{{- end }}
- name: checkpoint{{ $suffix }}
  image:
    reference: {{ $weights.image }}
    pullPolicy: {{ .root.Values.imagePullPolicy }}
{{- else if eq .model.volume "claim" }}
- name: models{{ $suffix }}
  persistentVolumeClaim:
    claimName: {{ $weights.claim }}
{{- else if eq .model.volume "size" }}
- name: models{{ $suffix }}
  persistentVolumeClaim:
    claimName: {{ include "pagoda.name" . }}-models
{{- end }}
{{- end }}
{{- end }}

{{- define "pagoda.models.mount" -}}
{{- if and (ne .component "scheduler") (not .model.isEmbedded) }}
{{- $suffix := ternary (printf "-%s" .name) "" (eq (.isShared | default false) true) }}
{{- if not (and .isShared (eq .model.volume "image")) }}
- name: models{{ $suffix }}
  mountPath: {{ include "pagoda.folder" . }}
{{- end }}
{{- if eq .model.volume "image" }}
- name: checkpoint{{ $suffix }}
  mountPath: {{ include "pagoda.imageFolder" . }}
  readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{- define "pagoda.mounts" -}}
- name: tmp
  mountPath: /tmp
{{- include "pagoda.models.mount" . }}
{{- range $name, $model := .models }}
{{- if $model.isNamed }}
{{- include "pagoda.models.mount" (dict "root" $.root "name" $name "model" $model "component" "frontend" "isShared" true) }}
{{- end }}
{{- end }}
{{- if include "pagoda.tls" .root }}
- name: tls
  mountPath: /etc/pagoda/tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "pagoda.volumes" -}}
- name: tmp
  emptyDir:
    {{- if eq .component "worker" }} {}{{ else }}
    sizeLimit: 1Gi
    {{- end }}
{{- include "pagoda.models.volume" . }}
{{- range $name, $model := .models }}
{{- if $model.isNamed }}
{{- include "pagoda.models.volume" (dict "root" $.root "name" $name "model" $model "component" "frontend" "isShared" true) }}
{{- end }}
{{- end }}
{{- if include "pagoda.tls" .root }}
- name: tls
  secret:
    secretName: {{ get .root.Values.tls .component }}
    defaultMode: 288
{{- end }}
{{- end }}

{{/* The init containers of frontends. */}}
{{- define "pagoda.downloads" -}}
{{- include "pagoda.download" . }}
{{- range $name, $model := .models }}
{{- with include "pagoda.download" (dict "root" $.root "name" $name "model" $model "component" "frontend" "isShared" true) }}
{{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Fetches the checkpoint, or waits for who does. Shared frontends fetch tokenizers: they wait for no one's weights. */}}
{{- define "pagoda.download" -}}
{{- $weights := .model.weights }}
{{- if $weights.source }}
{{- $isLocal := has .model.volume (list "perPod" "hostPath") }}
{{- if .isShared }}{{ $isLocal = true }}{{ end }}
{{- $waits := and .model.isShared (not .isShared) (or (eq .component "frontend") (eq ($weights.download | default "init") "job")) -}}
- name: download{{ if .isShared }}-{{ .name }}{{ end }}
  image: {{ .root.Values.images.download | default .image | default .root.Values.images.worker }}
  imagePullPolicy: {{ .root.Values.imagePullPolicy }}
  command: [pagoda-download]
  args:
    - {{ $weights.source | quote }}
    - {{ include "pagoda.location" . }}
    {{- with $weights.revision }}
    - --revision={{ . }}
    {{- end }}
    {{- if and $waits (not .isJob) }}
    - --wait
    {{- else if and $isLocal (eq .component "frontend") }}
    - --without-weights
    {{- end }}
  env:
    - name: HOME
      value: /tmp
    - name: HF_HOME
      value: /tmp/hub
    {{- with .root.Values.secrets.hub }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ . }}
          key: token
          optional: true
    {{- end }}
  {{- with $weights.secret }}
  envFrom:
    - secretRef:
        name: {{ . }}
  {{- end }}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {memory: 2Gi}
  {{- include "pagoda.restricted" . | nindent 2 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: models{{ if .isShared }}-{{ .name }}{{ end }}
      mountPath: {{ include "pagoda.folder" . }}
{{- end }}
{{- end }}

{{/* gRPC probes of a service; the kubelet's own speak no TLS. Takes port, tlsName and startupSeconds besides. */}}
{{- define "pagoda.probes" -}}
{{- $isWorker := eq .component "worker" }}
{{- if include "pagoda.tls" .root }}
{{- $ask := list "pagoda-health" (printf "127.0.0.1:%d" (int .port)) }}
{{- $name := printf "--tls-server-name=%s" .tlsName -}}
startupProbe:
  exec:
    command: {{ concat $ask (list "--service=liveness" $name) | toJson }}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: {{ div (add (int .startupSeconds) 4) 5 }}
readinessProbe:
  exec:
    command: {{ concat $ask (list $name) | toJson }}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 2
livenessProbe:
  exec:
    command: {{ concat $ask (list "--service=liveness" $name) | toJson }}
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: {{ ternary 6 3 $isWorker }}
{{- else -}}
startupProbe:
  grpc:
    port: {{ .port }}
    service: liveness
  periodSeconds: 1
  failureThreshold: {{ .startupSeconds }}
readinessProbe:
  grpc:
    port: {{ .port }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  grpc:
    port: {{ .port }}
    service: liveness
  periodSeconds: {{ ternary 10 5 $isWorker }}
  timeoutSeconds: {{ ternary 10 5 $isWorker }}
  failureThreshold: {{ ternary 6 3 $isWorker }}
{{- end }}
{{- end }}

{{- define "pagoda.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .full }}
  labels: {{- include "pagoda.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "pagoda.selector" . | nindent 6 }}
{{- end }}

{{/* A PodMonitor. Takes ports besides. */}}
{{- define "pagoda.monitor" }}
---
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {{ include "pagoda.name" . }}-{{ .component }}
  labels: {{- merge (deepCopy .root.Values.monitoring.labels) (include "pagoda.labels" . | fromYaml) | toYaml | nindent 4 }}
spec:
  selector:
    matchLabels: {{- include "pagoda.selector" . | nindent 6 }}
  podTargetLabels: [pagoda/model, app.kubernetes.io/instance]
  podMetricsEndpoints:
    {{- range .ports }}
    - port: {{ . }}
      path: /metrics
      interval: 15s
      relabelings:
        - targetLabel: job
          replacement: pagoda-{{ $.component }}
    {{- end }}
{{- end }}
