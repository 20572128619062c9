{{/* The pods of a set of worker groups. All ranks of a pod are in one container: each device reaches the others. */}}
{{- define "pagoda.worker.template" -}}
{{- $values := .root.Values }}
{{- $worker := .worker }}
{{- $gpus := int $worker.gpus }}
{{- $ranks := int $worker.ranks }}
{{- $nodes := int $worker.nodes }}
{{- $image := $worker.image | default (ternary $values.images.gpuWorker $values.images.worker (gt $gpus 0)) }}
{{- $tolerations := list }}
{{- $nodeSelector := dict }}
{{- if gt $gpus 0 }}
{{- $tolerations = list (dict "key" $values.gpuResource "operator" "Exists" "effect" "NoSchedule") }}
{{- /* Set by NVIDIA's feature discovery. */}}
{{- if eq $values.gpuResource "nvidia.com/gpu" }}{{ $_ := set $nodeSelector "nvidia.com/gpu.present" "true" }}{{ end }}
{{- end }}
{{- if hasKey $worker "tolerations" }}{{ $tolerations = $worker.tolerations }}{{ end }}
{{- if hasKey $worker "nodeSelector" }}{{ $nodeSelector = $worker.nodeSelector }}{{ end -}}
metadata:
  labels: {{- include "pagoda.labels" . | nindent 4 }}
  annotations: {{- include "pagoda.annotations" . | nindent 4 }}
spec: {{- include "pagoda.pod" . | nindent 2 }}
  # What runs here goes back to the scheduler's queue at once.
  terminationGracePeriodSeconds: {{ ternary 45 30 (gt (mul $ranks $nodes) 1) }}
  {{- include "pagoda.spread" . | nindent 2 }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $worker.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "pagoda.download" (merge (dict "image" $image) .) }}
  initContainers: {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ $image }}
      {{- include "pagoda.container" . | nindent 6 }}
      args:
        - --host=0.0.0.0
        - --port=50053
        - --advertise-address=$(POD_IP):50053
        - --metrics-port=9090
        {{- if gt $ranks 1 }}
        - --tensor-parallel-size={{ $ranks }}
        {{- end }}
        {{- if gt $nodes 1 }}
        {{- with $worker.numbers }}
        - --group={{ . }}$(LWS_GROUP_INDEX)
        {{- end }}
        {{- else if gt $ranks 1 }}
        - --group={{ $worker.numbers }}$(GROUP)
        {{- end }}
      env:
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- if gt $nodes 1 }}
        # LWS_WORKER_INDEX (since 0.6) and LWS_GROUP_SIZE are there already; of the group's number there is only a
        # label, and it is a number unless spec.groupIdentity says otherwise.
        - name: LWS_GROUP_INDEX
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/group-index']
        {{- if include "pagoda.tls" .root }}
        # What ranks on several nodes send each other is not encrypted; with certificates this allows nothing else.
        - name: PAGODA_INSECURE
          value: "true"
        {{- end }}
        {{- else if gt $ranks 1 }}
        - name: GROUP
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
        {{- end }}
        {{- if gt $gpus 0 }}
        - name: NVIDIA_DRIVER_CAPABILITIES
          value: compute,utility
        {{- end }}
        {{- include "pagoda.env" . | nindent 8 }}
      ports:
        {{- range $rank := until $ranks }}
        {{- $suffix := ternary "" (printf "-%d" $rank) (eq $rank 0) }}
        - name: grpc{{ $suffix }}
          containerPort: {{ add 50053 $rank }}
        - name: metrics{{ $suffix }}
          containerPort: {{ add 9090 $rank }}
        {{- end }}
      {{- $startup := $worker.startupSeconds | default 1800 }}
      {{- $asks := dict "port" 50053 "tlsName" $values.tls.workerName "startupSeconds" $startup }}
      {{- include "pagoda.probes" (merge $asks .) | nindent 6 }}
      {{- $kind := ternary "gpuWorker" "worker" (gt $gpus 0) }}
      {{- $resources := include "pagoda.resources" (merge (dict "kind" $kind "own" $worker.resources) .) | fromYaml }}
      {{- if gt $gpus 0 }}
      {{- $asked := dict $values.gpuResource $gpus }}
      {{- $resources = mergeOverwrite $resources (dict "requests" $asked "limits" $asked) }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts: {{- include "pagoda.mounts" . | nindent 8 }}
        - name: shared-memory
          mountPath: /dev/shm
  volumes: {{- include "pagoda.volumes" . | nindent 4 }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ $worker.sharedMemory | default (ternary "8Gi" "1Gi" (gt $gpus 0)) }}
{{- end }}

{{/* By requests, never by CPU: a worker with one request may keep its cores busy. The queue asks for more groups; what runs
keeps those that there are, as an empty queue may well be their work. */}}
{{- define "pagoda.worker.autoscaler" -}}
{{- $root := .root }}
{{- $name := .name }}
{{- $least := max (int .worker.replicas) 1 }}
{{- $targets := dict "vllm:num_requests_waiting" (.autoscaling.waiting | default 8) }}
{{- $_ := set $targets "vllm:num_requests_running" (.autoscaling.running | default 64) }}
{{- $behavior := dict "scaleUp" (dict "stabilizationWindowSeconds" 30) }}
{{- $_ := set $behavior "scaleDown" (dict "stabilizationWindowSeconds" 600) }}
{{- $labels := dict "job" "pagoda-scheduler" "pagoda_model" $name "app_kubernetes_io_instance" $root.Release.Name }}
{{- if eq $root.Values.autoscaling.by "keda" -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
{{- else -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
{{- end }}
metadata:
  name: {{ .full }}
  labels: {{- include "pagoda.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    {{- if .isGroup }}
    apiVersion: leaderworkerset.x-k8s.io/v1
    kind: LeaderWorkerSet
    {{- else }}
    apiVersion: apps/v1
    kind: StatefulSet
    {{- end }}
    name: {{ .full }}
  {{- if eq $root.Values.autoscaling.by "keda" }}
  minReplicaCount: {{ $least }}
  maxReplicaCount: {{ .autoscaling.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- toYaml $behavior | nindent 8 }}
  # A metric that is not there is no empty queue: the number of groups stays (ignoreNullValues).
  triggers:
    {{- range $metric, $target := $targets }}
    - type: prometheus
      metadata:
        serverAddress: {{ $root.Values.autoscaling.prometheus }}
        {{- $matchers := list (printf "namespace=%q" $root.Release.Namespace) }}
        {{- range $label, $value := $labels }}{{ $matchers = append $matchers (printf "%s=%q" $label $value) }}{{ end }}
        query: sum({{ $metric }}{ {{- join "," $matchers -}} })
        threshold: {{ toString $target | quote }}
        ignoreNullValues: "false"
    {{- end }}
  {{- else }}
  minReplicas: {{ $least }}
  maxReplicas: {{ .autoscaling.maxReplicas }}
  metrics:
    {{- range $metric, $target := $targets }}
    - type: External
      external:
        metric:
          name: {{ $metric }}
          selector:
            matchLabels: {{- toYaml $labels | nindent 14 }}
        target:
          type: AverageValue
          averageValue: {{ toString $target | quote }}
    {{- end }}
  behavior: {{- toYaml $behavior | nindent 4 }}
  {{- end }}
{{- end }}
