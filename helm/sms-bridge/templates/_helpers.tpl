{{- define "sms-bridge.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* 47 characters leave room for a suffix of 16. */}}
{{- define "sms-bridge.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name }}
{{- $full := printf "%s-%s" .Release.Name $name }}
{{- if contains $name .Release.Name }}{{ $full = .Release.Name }}{{ end }}
{{- .Values.fullnameOverride | default $full | replace "." "-" | trunc 47 | trimSuffix "-" }}
{{- end }}

{{- define "sms-bridge.serviceAccountName" -}}
{{- $default := ternary (include "sms-bridge.fullname" .) "default" .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default $default }}
{{- end }}

{{/* The label helpers take a dict of root and, for what belongs to one role, component. */}}
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
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{ include "sms-bridge.selectorLabels" . }}
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

{{/* Where the pods find their files. */}}
{{- define "sms-bridge.configDir" -}}/etc/sms-bridge/config{{- end }}
{{- define "sms-bridge.secretsDir" -}}/etc/sms-bridge/secrets{{- end }}

{{/* The Secret files of one role, and no others. The paths are those that the config names. */}}
{{- define "sms-bridge.secretSources" -}}
{{- $v := .root.Values }}
- secret:
    name: {{ $v.rabbitmq.existingSecret | quote }}
    items:
      - key: {{ $v.rabbitmq.secretKeys.username | quote }}
        path: rabbitmq/username
      - key: {{ $v.rabbitmq.secretKeys.password | quote }}
        path: rabbitmq/password
{{- with $v.rabbitmq.tls }}
{{- if and .enabled .existingSecret }}
- secret:
    name: {{ .existingSecret | quote }}
    items:
      {{- with .caKey }}
      - key: {{ . | quote }}
        path: rabbitmq/ca.crt
      {{- end }}
      {{- with .certKey }}
      - key: {{ . | quote }}
        path: rabbitmq/tls.crt
      {{- end }}
      {{- with .keyKey }}
      - key: {{ . | quote }}
        path: rabbitmq/tls.key
      {{- end }}
{{- end }}
{{- end }}
{{- if eq .component "worker" }}
- secret:
    name: {{ $v.smsApi.existingSecret | quote }}
    items:
      - key: {{ $v.smsApi.secretKeys.key | quote }}
        path: sms-api/key
{{- with $v.smsApi.caSecret }}
{{- if .name }}
- secret:
    name: {{ .name | quote }}
    items:
      - key: {{ .key | quote }}
        path: sms-api/ca.crt
{{- end }}
{{- end }}
{{- else }}
- secret:
    name: {{ $v.webhookSecrets.existingSecret | quote }}
    items:
      {{- range $v.webhookSecrets.secretKeys }}
      - key: {{ . | quote }}
        path: {{ printf "webhook/%s" . | quote }}
      {{- end }}
{{- end }}
{{- end }}
