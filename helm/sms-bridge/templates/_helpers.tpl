{{- define "sms-bridge.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* 47 characters leave room for a suffix of 16 characters, such as -webhook-metrics. */}}
{{- define "sms-bridge.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name }}
{{- $full := printf "%s-%s" .Release.Name $name }}
{{- if contains $name .Release.Name }}{{ $full = .Release.Name }}{{ end }}
{{- .Values.fullnameOverride | default $full | replace "." "-" | trunc 47 | trimSuffix "-" }}
{{- end }}

{{- define "sms-bridge.namespace" -}}
{{- .Values.namespaceOverride | default .Release.Namespace }}
{{- end }}

{{- define "sms-bridge.serviceAccountName" -}}
{{- $default := ternary (include "sms-bridge.fullname" .) "default" .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default $default }}
{{- end }}

{{/* The roles that run. */}}
{{- define "sms-bridge.roles" -}}
{{- $roles := list }}
{{- range list "worker" "webhook" }}{{ if (get $.Values .).enabled }}{{ $roles = append $roles . }}{{ end }}{{ end }}
{{- toJson $roles }}
{{- end }}

{{/*
The helpers for labels and metadata take a dict of root and, for objects of one role, component.
Selectors contain no version, because they cannot change.
*/}}
{{- define "sms-bridge.selectorLabels" -}}
app.kubernetes.io/name: {{ include "sms-bridge.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "sms-bridge.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: sms-bridge
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{ include "sms-bridge.selectorLabels" . }}
{{- end }}

{{/* Also takes suffix or name, namespace, labels and annotations. */}}
{{- define "sms-bridge.metadata" -}}
{{- $name := list (include "sms-bridge.fullname" .root) .suffix | compact | join "-" -}}
name: {{ .name | default $name }}
namespace: {{ .namespace | default (include "sms-bridge.namespace" .root) }}
labels: {{- merge (include "sms-bridge.labels" . | fromYaml) (.labels | default dict) .root.Values.commonLabels | toYaml | nindent 2 }}
{{- with merge dict (.annotations | default dict) .root.Values.commonAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Takes the arguments of metadata, and podLabels. */}}
{{- define "sms-bridge.podLabels" -}}
{{- $labels := include "sms-bridge.selectorLabels" . | fromYaml }}
{{- $_ := set $labels "app.kubernetes.io/version" .root.Chart.AppVersion }}
{{- merge $labels .podLabels .root.Values.commonLabels | toYaml }}
{{- end }}

{{/* The checksum restarts the pods if config.yaml changes. Takes the arguments of metadata, and podAnnotations. */}}
{{- define "sms-bridge.podAnnotations" -}}
{{- $notes := dict "kubectl.kubernetes.io/default-container" .component }}
{{- if not .root.Values.existingConfigMap }}{{ $_ := set $notes "checksum/config" (include "sms-bridge.config" .root | sha256sum) }}{{ end }}
{{- merge $notes .podAnnotations .root.Values.commonAnnotations | toYaml }}
{{- end }}

{{- define "sms-bridge.image" -}}
{{- $image := .Values.image }}
{{- $registry := .Values.global.imageRegistry | default $image.registry }}
{{- $tag := $image.tag }}
{{- if not (or $tag $image.digest) }}{{ $tag = .Chart.AppVersion }}{{ end }}
{{- list $registry $image.repository | compact | join "/" }}
{{- with $tag }}:{{ . }}{{ end }}
{{- with $image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "sms-bridge.imagePullSecrets" -}}
{{- with concat (.Values.global.imagePullSecrets | default list) .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The custom probe, or a probe of the admin port. Takes path, probe and custom. */}}
{{- define "sms-bridge.probe" -}}
{{- $asked := dict "httpGet" (dict "path" .path "port" "admin") }}
{{- .custom | default (merge $asked .probe) | toYaml }}
{{- end }}

{{/* The minimum number of pods of a role. */}}
{{- define "sms-bridge.minReplicas" -}}
{{- if (.keda | default dict).enabled }}{{ .keda.minReplicaCount }}
{{- else if .autoscaling.enabled }}{{ .autoscaling.minReplicas }}
{{- else }}{{ .replicaCount }}{{ end }}
{{- end }}

{{/*
How many seconds a pod takes to stop. After the drain, closing connections takes at most 4 s.
*/}}
{{- define "sms-bridge.stopSeconds" -}}
{{- add .preStopSleepSeconds .shutdownTimeoutSeconds 5 }}
{{- end }}

{{- define "sms-bridge.gracePeriodSeconds" -}}
{{- .terminationGracePeriodSeconds | default (add .preStopSleepSeconds .shutdownTimeoutSeconds 10) | int }}
{{- end }}
