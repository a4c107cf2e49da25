{{/* Refuses values that cannot work, with one sentence for each fault, before anything is rendered. */}}
{{- define "sms-bridge.validate" -}}
{{- $faults := list }}
{{- range $part := list "roles" "services" "credentials" "tls" "settings" "stopping" "scaling" "endpoints" "exposure" "sandbox" "topology" }}
{{- range include (printf "sms-bridge.validate.%s" $part) $ | splitList "\n" }}
{{- with trim . }}{{ $faults = append $faults . }}{{ end }}
{{- end }}
{{- end }}
{{- with $faults }}
{{- fail (printf "these values cannot be installed:\n- %s" (join "\n- " .)) }}
{{- end }}
{{- end }}

{{/* Each part writes one line for each fault. */}}

{{- define "sms-bridge.validate.roles" }}
{{- if not (or .Values.worker.enabled .Values.webhook.enabled) }}
worker.enabled and webhook.enabled are both false: there is nothing to deploy.
{{- end }}
{{- if not .Values.image.repository }}
image.repository is empty: set the image's repository, without the registry {{ .Values.image.registry }}.
{{- end }}
{{- with .Values.rabbitmq }}
{{- if not (or .host .hosts .secretKeys.host) }}
rabbitmq.host is empty: set RabbitMQ's host, a cluster's hosts in rabbitmq.hosts, or the Secret's key with the host in rabbitmq.secretKeys.host.
{{- end }}
{{- range $other, $value := dict "rabbitmq.host" .host "rabbitmq.secretKeys.host" .secretKeys.host }}
{{- if and $.Values.rabbitmq.hosts $value }}
{{ join " and " (list $other "rabbitmq.hosts" | sortAlpha) }} are both set: remove one.
{{- end }}
{{- end }}
{{- range $part := list "host" "port" }}
{{- if and (get $.Values.rabbitmq $part) (get $.Values.rabbitmq.secretKeys $part) }}
rabbitmq.{{ $part }} and rabbitmq.secretKeys.{{ $part }} are both set: remove one.
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.worker.enabled (not (include "sms-bridge.smsApiUrl" .)) }}
smsApi.baseUrl is empty: set the address of the SMS service, because the preset {{ include "sms-bridge.smsApiPreset" . }} has none, or set smsApi.preset.
{{- end }}
{{- if and .Values.webhook.enabled (eq (int .Values.admin.port) (int .Values.webhook.containerPort)) }}
admin.port and webhook.containerPort are both {{ .Values.admin.port }}: metrics must not be public. Change one.
{{- end }}
{{- end }}

{{/* Settings that the bridge needs to start, as far as the values contain them. */}}
{{- define "sms-bridge.validate.services" }}
{{- $needs := .Files.Get "files/service-needs.yaml" | fromYaml }}
{{- $preset := include "sms-bridge.smsApiPreset" . }}
{{- $given := .Values.smsApi.account | default (.Values.config.sms_api | default dict).account }}
{{- range .Values.worker.extraEnv }}
{{- if eq (upper .name) "SMS_BRIDGE_SMS_API__ACCOUNT" }}{{ $given = .name }}{{ end }}
{{- end }}
{{- if and .Values.worker.enabled (not .Values.sandbox.enabled) (not .Values.existingConfigMap) (not .Values.worker.extraEnvFrom) (not $given) }}
{{- with (get $needs $preset).account }}
smsApi.account is empty: the preset {{ $preset }} needs {{ . }}.
{{- end }}
{{- end }}
{{- if .Values.webhook.enabled }}
{{- range $endpoint := include "sms-bridge.endpoints" . | fromJsonArray }}
{{- $settings := $endpoint.config }}
{{- $where := printf "config.public_url of the webhook.endpoints with the path %s" $endpoint.path }}
{{- if $endpoint.isDefault }}
{{- $where = "config.webhook.public_url" }}
{{- $settings = ternary dict ($.Values.config.webhook | default dict) (or $.Values.sandbox.enabled (not (empty $.Values.existingConfigMap)) (not (empty $.Values.webhook.extraEnvFrom))) }}
{{- if include "sms-bridge.setsPublicUrl" $ }}{{ $settings = dict }}{{ end }}
{{- end }}
{{- $signature := $settings.signature | default dict }}
{{- $scheme := $signature.preset | default $settings.preset | default "generic" }}
{{- if and (get $needs $scheme | default dict).public_url (not $settings.public_url) (not $endpoint.config.public_url) (not $signature.signed_content) }}
{{ $where }} is empty: {{ $scheme }} signs the whole address that it calls. Set this address.
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "sms-bridge.validate.credentials" }}
{{- $needed := dict "rabbitmq" (include "sms-bridge.rabbitmqKeys" . | fromJsonArray) }}
{{- if .Values.worker.enabled }}
{{- with include "sms-bridge.smsApiKeys" . | fromJson | values | sortAlpha }}{{ $_ := set $needed "smsApi" . }}{{ end }}
{{- end }}
{{- if and .Values.webhook.enabled (not .Values.webhook.endpoints) }}{{ $_ := set $needed "webhookSecrets" .Values.webhookSecrets.secretKeys }}{{ end }}
{{- $e := .Values.externalSecrets }}
{{- range $credential, $keys := $needed }}
{{- if not (include "sms-bridge.secretName" (dict "root" $ "credential" $credential)) }}
{{- $literals := list }}
{{- range $keys }}{{ $literals = append $literals (printf "--from-literal=%s=..." .) }}{{ end }}
{{ $credential }}.existingSecret is empty: set the name of a Secret with {{ join " and " $keys }}, created by `kubectl create secret generic NAME --namespace {{ include "sms-bridge.namespace" $ }} {{ join " " $literals }}`
{{- if $e.enabled }}, or set externalSecrets.remoteRefs.{{ $credential }}{{ end }}{{ if eq $credential "webhookSecrets" }}; without a secret no webhook can be verified{{ end }}.
{{- end }}
{{- if and $e.enabled (get $e.remoteRefs $credential) (get $.Values $credential).existingSecret }}
{{ $credential }}.existingSecret and externalSecrets.remoteRefs.{{ $credential }} are both set: remove one.
{{- end }}
{{- end }}
{{- if and $e.enabled (not $e.secretStoreRef.name) }}
externalSecrets.secretStoreRef.name is empty: set the name of the secret store.
{{- end }}
{{- end }}

{{- define "sms-bridge.validate.tls" }}
{{- with .Values.rabbitmq.tls }}
{{- if and .existingSecret (not .enabled) }}
rabbitmq.tls.existingSecret is set but rabbitmq.tls.enabled is false: enable TLS or remove the Secret.
{{- end }}
{{- if ne (empty .certKey) (empty .keyKey) }}
rabbitmq.tls.certKey and rabbitmq.tls.keyKey go together: set both or neither.
{{- end }}
{{- if and .certKey (not .existingSecret) }}
rabbitmq.tls.certKey is set but rabbitmq.tls.existingSecret is empty: set the Secret with the client certificate.
{{- end }}
{{- if and .existingSecret (not (or .caKey .certKey)) }}
rabbitmq.tls.existingSecret is set but caKey and certKey are both empty: set a key or remove the Secret.
{{- end }}
{{- end }}
{{- end }}

{{- define "sms-bridge.validate.settings" }}
{{- if and .Values.existingConfigMap .Values.config }}
config and existingConfigMap are both set: remove one.
{{- end }}
{{- range $section, $keys := include "sms-bridge.ownSettings" . | fromYaml }}
{{- range $key, $instead := $keys }}
{{- if hasKey (get $.Values.config $section | default dict) $key }}
config.{{ $section }}.{{ $key }} is set by the chart: use {{ $instead }}.
{{- end }}
{{- $variable := printf "SMS_BRIDGE_%s__%s" $section $key | upper }}
{{- range $part := list "worker" "webhook" "toolbox" }}
{{- range (get $.Values $part).extraEnv }}
{{- if or (eq (upper .name) $variable) (hasPrefix (printf "%s__" $variable) (upper .name)) }}
{{ $part }}.extraEnv sets {{ .name }}, which the chart sets: use {{ $instead }}.
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $api := .Values.config.sms_api | default dict }}
{{- range $key := list "preset" "account" }}
{{- if and (get $.Values.smsApi $key) (get $api $key) }}
smsApi.{{ $key }} and config.sms_api.{{ $key }} are both set: remove one.
{{- end }}
{{- end }}
{{- if ($api.auth | default dict).username_file }}
config.sms_api.auth.username_file is set by the chart: use smsApi.secretKeys.username.
{{- end }}
{{- if contains "@" (get $api "proxy" | default "" | toString) }}
config.sms_api.proxy contains a user or a password, and a ConfigMap is not secret: remove them.
{{- end }}
{{- end }}

{{- define "sms-bridge.validate.stopping" }}
{{- with .Values.worker }}
{{- if and .enabled (lt (float64 .shutdownTimeoutSeconds) (float64 $.Values.smsApi.timeoutSeconds)) }}
worker.shutdownTimeoutSeconds ({{ .shutdownTimeoutSeconds }}) is below smsApi.timeoutSeconds ({{ $.Values.smsApi.timeoutSeconds }}): a stopping worker would cut a request off, and it would be unknown whether the SMS was sent.
{{- end }}
{{- end }}
{{- with .Values.webhook }}
{{- $body := include "sms-bridge.seconds" (include "sms-bridge.setting" (list $ "webhook" "body_timeout_seconds") | fromJson).value }}
{{- $answer := include "sms-bridge.seconds" (include "sms-bridge.setting" (list $ "webhook" "response_timeout_seconds") | fromJson).value }}
{{- if and .enabled (lt (float64 .shutdownTimeoutSeconds) (addf $body $answer)) }}
webhook.shutdownTimeoutSeconds ({{ .shutdownTimeoutSeconds }}) is below the {{ addf $body $answer }} seconds that one request may take (body_timeout_seconds {{ $body }} and response_timeout_seconds {{ $answer }}): a stopping pod would cut webhooks off.
{{- end }}
{{- end }}
{{- range $role := list "worker" "webhook" }}
{{- $r := get $.Values $role }}
{{- $needed := include "sms-bridge.stopSeconds" $r }}
{{- if and $r.enabled (lt (include "sms-bridge.gracePeriodSeconds" $r | int) (int $needed)) }}
{{ $role }}.terminationGracePeriodSeconds ({{ $r.terminationGracePeriodSeconds }}) is below the {{ $needed }} seconds that stopping takes (preStopSleepSeconds {{ $r.preStopSleepSeconds }}, shutdownTimeoutSeconds {{ $r.shutdownTimeoutSeconds }}, and 5 to close): Kubernetes would kill the pod before it has finished.
{{- end }}
{{- end }}
{{- end }}

{{- define "sms-bridge.validate.scaling" }}
{{- if and .Values.worker.enabled (eq (include "sms-bridge.setting" (list . "worker" "ordering") | fromJson).value "recipient") }}
{{- with .Values.worker }}
{{- if or .autoscaling.enabled .keda.enabled }}
config.worker.ordering is recipient, where one worker sends and the others stand by: an autoscaler would only add standbys. Disable worker.autoscaling and worker.keda; worker.replicaCount 2 keeps one in reserve.
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.worker }}
{{- if and .enabled .keda.enabled }}
{{- if .autoscaling.enabled }}
worker.autoscaling.enabled and worker.keda.enabled are both true: KEDA creates its own HorizontalPodAutoscaler. Disable one.
{{- end }}
{{- if not .keda.managementUrl }}
worker.keda.managementUrl is empty: set the URL of RabbitMQ's management API, such as http://rabbitmq:15672.
{{- end }}
{{- if eq (empty .keda.existingSecret) (empty .keda.authenticationRef.name) }}
worker.keda needs either existingSecret, with a monitoring user's {{ .keda.secretKeys.username }} and {{ .keda.secretKeys.password }}, or authenticationRef.name.
{{- end }}
{{- if gt (int .keda.minReplicaCount) (int .keda.maxReplicaCount) }}
worker.keda.minReplicaCount ({{ .keda.minReplicaCount }}) is above maxReplicaCount ({{ .keda.maxReplicaCount }}).
{{- end }}
{{- end }}
{{- end }}
{{- range $role := list "worker" "webhook" }}
{{- $r := get $.Values $role }}
{{- with $r.autoscaling }}
{{- if and $r.enabled .enabled }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{ $role }}.autoscaling.minReplicas ({{ .minReplicas }}) is above maxReplicas ({{ .maxReplicas }}).
{{- end }}
{{- if not (or .targetCPUUtilizationPercentage .targetMemoryUtilizationPercentage .metrics) }}
{{ $role }}.autoscaling has no metric: set targetCPUUtilizationPercentage, targetMemoryUtilizationPercentage or metrics.
{{- end }}
{{- range $resource, $target := dict "cpu" .targetCPUUtilizationPercentage "memory" .targetMemoryUtilizationPercentage }}
{{- if and $target (not (get (($r.resources).requests | default dict) $resource)) }}
{{ $role }}.autoscaling uses {{ $resource }}, in percent of {{ $role }}.resources.requests.{{ $resource }}, which is empty.
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- with $r.podDisruptionBudget }}
{{- if and $r.enabled .enabled .minAvailable }}
{{- $least := include "sms-bridge.minReplicas" $r | int }}
{{- $stay := int .minAvailable }}
{{- if kindIs "string" .minAvailable }}{{ $stay = ceil (divf (mulf (trimSuffix "%" .minAvailable | float64) $least) 100) | int }}{{ end }}
{{- if ge $stay $least }}
{{ $role }}.podDisruptionBudget.minAvailable ({{ .minAvailable }}) keeps all pods ({{ $least }}): node drains would hang. Use maxUnavailable.
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "sms-bridge.validate.endpoints" }}
{{- if .Values.webhook.enabled }}
{{- $taken := dict }}
{{- range $endpoint := include "sms-bridge.endpoints" . | fromJsonArray }}
{{- if hasKey $taken $endpoint.path }}
webhook.endpoints has the path {{ $endpoint.path }} twice, or it is also webhook.path: give each endpoint its own path.
{{- end }}
{{- $_ := set $taken $endpoint.path true }}
{{- end }}
{{- if not (include "sms-bridge.endpoints" . | fromJsonArray | first).isDefault }}
{{- if .Values.tests.signed }}
tests.signed is true but webhookSecrets.existingSecret is empty: the test signs for webhook.path, which is then not served.
{{- end }}
{{- if ne .Values.webhook.path "/webhooks" }}
webhook.path is set but webhookSecrets.existingSecret is empty: with webhook.endpoints, webhook.path is served only with a Secret.
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "sms-bridge.validate.exposure" }}
{{- range $key, $types := dict "nodePort" (list "NodePort" "LoadBalancer") "externalTrafficPolicy" (list "NodePort" "LoadBalancer") "loadBalancerClass" (list "LoadBalancer") "loadBalancerSourceRanges" (list "LoadBalancer") }}
{{- if and (get $.Values.webhook.service $key) (not (has $.Values.webhook.service.type $types)) }}
webhook.service.{{ $key }} is set but webhook.service.type is {{ $.Values.webhook.service.type }}: it needs {{ join " or " $types }}.
{{- end }}
{{- end }}
{{- range $way, $needed := dict "ingress" "hosts" "httpRoute" "parentRefs" }}
{{- $w := get $.Values $way }}
{{- if and $w.enabled (not $.Values.webhook.enabled) }}
{{ $way }}.enabled is true but webhook.enabled is false: there is nothing to route to.
{{- end }}
{{- if and $w.enabled (not (get $w $needed)) }}
{{ $way }}.{{ $needed }} is empty: set {{ ternary "the host that the SMS service calls" "the gateway" (eq $way "ingress") }}.
{{- end }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.rabbitmq.secretKeys.port }}
networkPolicy.enabled needs RabbitMQ's port: set rabbitmq.port instead of rabbitmq.secretKeys.port.
{{- end }}
{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled }}
podMonitor.enabled and serviceMonitor.enabled are both true: every pod would be scraped twice. Disable one.
{{- end }}
{{- end }}

{{- define "sms-bridge.validate.sandbox" }}
{{- if .Values.sandbox.enabled }}
{{- $one := "remove sandbox.enabled to send real texts, or the other to send none" }}
{{- with .Values.smsApi.baseUrl }}
sandbox.enabled and smsApi.baseUrl ({{ . }}), a real service, are both set: {{ $one }}.
{{- end }}
{{- $preset := include "sms-bridge.smsApiPreset" . }}
{{- if ne $preset "generic" }}
sandbox.enabled and the preset {{ $preset }}{{ with get (.Files.Get "files/sms-apis.yaml" | fromYaml) $preset }} ({{ . }}){{ end }}, a real service, are both set: {{ $one }}. The chart's sandbox imitates generic only.
{{- end }}
{{- $config := .Values.config }}
{{- with ($config.sms_api | default dict).proxy }}
sandbox.enabled and config.sms_api.proxy are both set: the worker would look for the sandbox behind the proxy. Remove the proxy.
{{- end }}
{{- if .Values.webhook.enabled }}
{{- if not (include "sms-bridge.sandboxEndpoint" . | fromJson) }}
sandbox.enabled is true but webhookSecrets.existingSecret is empty: the sandbox signs its webhooks for webhook.path, which is not served without it.
{{- end }}
{{- range $key := list "preset" "signature" }}
{{- with get ($config.webhook | default dict) $key }}
{{- if ne (toString .) "generic" }}
sandbox.enabled and config.webhook.{{ $key }} are both set: the sandbox signs as generic, so its webhooks would be refused. Remove one.
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "sms-bridge.validate.topology" }}
{{- $t := .Values.topology }}
{{- if $t.enabled }}
{{- if eq (empty $t.clusterReference.name) (empty $t.clusterReference.connectionSecret) }}
topology.clusterReference needs either the name of a RabbitmqCluster or a connectionSecret.
{{- end }}
{{- if and $t.createUser (or (ne .Values.rabbitmq.secretKeys.username "username") (ne .Values.rabbitmq.secretKeys.password "password")) }}
topology.createUser needs rabbitmq.secretKeys to be username and password: the operator uses only these.
{{- end }}
{{- with .Values.rabbitmq.secretKeys }}
{{- if and $t.createUser (or .host .port) (not (include "sms-bridge.importsUser" $)) }}
topology.createUser makes a Secret without host and port: set rabbitmq.host and rabbitmq.port instead of rabbitmq.secretKeys.host and rabbitmq.secretKeys.port.
{{- end }}
{{- end }}
{{- if and $t.extraBindings (not .Values.webhook.enabled) }}
topology.extraBindings is set but webhook.enabled is false: there is no exchange to bind to.
{{- end }}
{{- $objects := list }}
{{- range (include "sms-bridge.topology" . | fromJson).bindings }}
{{- if has .object $objects }}
topology.extraBindings names {{ .destination }} with the routing key {{ .routingKey }} twice.
{{- end }}
{{- $objects = append $objects .object }}
{{- end }}
{{- else if $t.extraBindings }}
topology.extraBindings is set but topology.enabled is false: nothing would create them.
{{- else if $t.createUser }}
topology.createUser is true but topology.enabled is false: nothing would create the user.
{{- end }}
{{- end }}
