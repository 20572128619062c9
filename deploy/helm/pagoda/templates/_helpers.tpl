{{/* Each takes a dict: root (the chart's context), name (of the model), component. */}}
{{- define "pagoda.name" -}}
{{ printf "%s-%s" (.root.Release.Name | trunc 20 | trimSuffix "-") .name }}
{{- end }}

{{- define "pagoda.selector" -}}
app.kubernetes.io/name: pagoda
app.kubernetes.io/instance: {{ .root.Release.Name }}
pagoda/model: {{ .name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "pagoda.labels" -}}
{{ include "pagoda.selector" . }}
app.kubernetes.io/part-of: pagoda
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "pagoda.settings" -}}
PAGODA_MODEL: {{ .model.model | quote }}
PAGODA_SCHEDULER: {{ printf "%s-scheduler:50052" (include "pagoda.name" .) | quote }}
PAGODA_INSECURE: "true"
{{- if gt (int .model.gpus) 0 }}
PAGODA_DEVICE: cuda
{{- end }}
{{- range $key, $value := .model.settings }}
PAGODA_{{ $key }}: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{/* What all pods have: who they are, and that they may do nothing. */}}
{{- define "pagoda.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "pagoda.container" -}}
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
envFrom:
  - configMapRef:
      name: {{ include "pagoda.name" . }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "pagoda.env" -}}
- name: HOME
  value: /tmp
{{- with .root.Values.secrets.serviceToken }}
- name: PAGODA_SERVICE_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{- if ne .component "scheduler" }}
{{- with .root.Values.secrets.hub }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{- if .model.modelClaim }}
- name: HF_HOME
  value: /models/hub
{{- end }}
{{- end }}
{{- end }}

{{- define "pagoda.mounts" -}}
- name: tmp
  mountPath: /tmp
{{- if and .model.modelClaim (ne .component "scheduler") }}
- name: models
  mountPath: /models
{{- end }}
{{- end }}

{{- define "pagoda.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if and .model.modelClaim (ne .component "scheduler") }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .model.modelClaim }}
{{- end }}
{{- end }}

{{- define "pagoda.annotations" -}}
pagoda/settings: {{ include "pagoda.settings" . | sha256sum | trunc 16 | quote }}
{{- end }}

{{/* The model's values over their defaults. */}}
{{- define "pagoda.model" -}}
{{- $defaults := dict "settings" dict "frontends" 2 "workers" 1 "gpus" 0 "tensorParallelSize" 1 "modelClaim" "" "maxFrontends" 0 }}
{{- $resources := dict "requests" (dict "cpu" "250m" "memory" "512Mi") "limits" (dict "memory" "4Gi") }}
{{- mergeOverwrite $defaults (dict "resources" $resources) (deepCopy .) | toYaml }}
{{- end }}
