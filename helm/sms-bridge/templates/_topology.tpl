{{/*
What the app itself would declare, name by name and argument by argument (bridge/topology/declarations.py), so
that its own look at the broker finds no difference: lists of queues, exchanges and bindings.
Bindings have an `object` too, to be named by; those of subscribers follow the app's own.
*/}}
{{- define "sms-bridge.topology" -}}
{{- $queues := list }}{{ $exchanges := list }}{{ $bindings := list }}
{{- if .Values.worker.enabled }}
{{- $main := (include "sms-bridge.setting" (list . "worker" "queue") | fromJson).value }}
{{- $requests := include "sms-bridge.requestQueues" . | fromJsonArray }}
{{- range $requests }}{{ $queues = append $queues (dict "name" .) }}{{ end }}
{{- range $queue := $requests }}
{{- range (include "sms-bridge.setting" (list $ "worker" "retry_delays") | fromJson).value }}
{{- $seconds := include "sms-bridge.seconds" . | float64 }}
{{- $arguments := dict
  "x-message-ttl" (round (mulf $seconds 1000) 0 | int64)
  "x-dead-letter-exchange" ""
  "x-dead-letter-routing-key" $queue
  "x-dead-letter-strategy" "at-least-once"
  "x-overflow" "reject-publish" }}
{{- $queues = append $queues (dict "name" (printf "%s.retry.%s" $queue (include "sms-bridge.duration" $seconds)) "arguments" $arguments) }}
{{- end }}
{{- end }}
{{- $queues = append $queues (dict "name" (printf "%s.dead" $main)) }}
{{- with (include "sms-bridge.setting" (list . "worker" "outcome_exchange") | fromJson).value }}
{{- $exchanges = append $exchanges (dict "name" .) }}
{{- end }}
{{- end }}
{{- if .Values.webhook.enabled }}
{{- $exchange := (include "sms-bridge.setting" (list . "webhook" "exchange") | fromJson).value }}
{{- $exchanges = append $exchanges (dict "name" $exchange) }}
{{- with include "sms-bridge.receiptExchange" . }}{{ $exchanges = append $exchanges (dict "name" .) }}{{ end }}
{{- with (include "sms-bridge.setting" (list . "webhook" "queue") | fromJson).value }}
{{- $queues = append $queues (dict "name" .) }}
{{- $bindings = append $bindings (dict "object" . "source" $exchange "destination" . "destinationType" "queue" "routingKey" "#") }}
{{- end }}
{{- range .Values.topology.extraBindings }}
{{- $binding := merge (dict "source" $exchange) . (dict "destinationType" "queue") }}
{{- /* One destination may have several. */}}
{{- $_ := set $binding "object" (printf "%s-%s" .destination (toJson $binding | sha256sum | trunc 8)) }}
{{- $bindings = append $bindings $binding }}
{{- end }}
{{- end }}
{{- dict "queues" $queues "exchanges" (uniq $exchanges) "bindings" $bindings | toJson }}
{{- end }}

{{/*
Where the webhook receiver tells what delivery receipts say: every preset but generic knows some, and
any endpoint may describe its own. Empty when nobody asks for outcome events, or none come.
*/}}
{{- define "sms-bridge.receiptExchange" -}}
{{- $own := .Values.config.webhook | default dict }}
{{- $has := false }}
{{- $configs := concat (list $own) ($own.endpoints | default list) }}
{{- range include "sms-bridge.endpoints" . | fromJsonArray }}{{ $configs = append $configs .config }}{{ end }}
{{- range $config := $configs }}
{{- if ne ($config.preset | default "generic") "generic" }}{{ $has = true }}{{ end }}
{{- if ($config.receipts | default dict).status_pointers }}{{ $has = true }}{{ end }}
{{- end }}
{{- with (include "sms-bridge.setting" (list . "worker" "outcome_exchange") | fromJson).value }}
{{- if $has }}{{ . }}{{ end }}
{{- end }}
{{- end }}

{{/* A pattern that matches exactly these names; `a.*` is `a` and what begins with `a.`. */}}
{{- define "sms-bridge.namesPattern" -}}
{{- $escaped := list }}
{{- range . }}
{{- $escaped = append $escaped (regexReplaceAll `\\.\\\*$` (regexQuoteMeta .) `(\..+)?`) }}
{{- end }}
{{- $escaped | join "|" | printf "^(%s)$" }}
{{- end }}

{{/*
The fewest permissions: with `declare` the app may create what it uses, and nothing else. Dead
letters and retries are read by the operators' commands only, of which `sms-bridge pause` makes a
queue. The workers' exchange and its queues are never declared by anybody else.
*/}}
{{- define "sms-bridge.permissions" -}}
{{- $t := include "sms-bridge.topology" . | fromJson }}
{{- $read := list }}{{ $write := list }}{{ $configure := list }}
{{- if .Values.worker.enabled }}
{{- $main := (include "sms-bridge.setting" (list . "worker" "queue") | fromJson).value }}
{{- $requests := include "sms-bridge.requestQueues" . | fromJsonArray }}
{{- $read = concat $read $requests }}
{{- $read = append $read (printf "%s.dead" $main) }}
{{- $read = append $read (printf "%s.paused" $main) }}
{{- range $queue := $t.queues }}
{{- range $requests }}{{ if hasPrefix (printf "%s.retry." .) $queue.name }}{{ $read = append $read $queue.name }}{{ end }}{{ end }}
{{- end }}
{{- $configure = append $configure (printf "%s.paused" $main) }}
{{- if eq (include "sms-bridge.setting" (list . "worker" "ordering") | fromJson).value "recipient" }}
{{- $configure = append $configure (printf "%s.active" $main) }}
{{- end }}
{{- /* Retries and dead letters go through the default exchange, which permissions call so. */}}
{{- $write = append $write "amq.default" }}
{{- if eq (include "sms-bridge.setting" (list . "worker" "coordination") | fromJson).value "on" }}
{{- $workers := printf "%s.workers.*" $main }}
{{- $configure = append $configure $workers }}
{{- $write = append $write $workers }}{{ $read = append $read $workers }}
{{- end }}
{{- end }}
{{- range $t.exchanges }}{{ $write = append $write .name }}{{ end }}
{{- if eq (include "sms-bridge.setting" (list . "rabbitmq" "topology") | fromJson).value "declare" }}
{{- range concat $t.queues $t.exchanges }}{{ $configure = append $configure .name }}{{ end }}
{{- /* To bind is to write to the queue and to read from the exchange; to dead-letter, to read too. */}}
{{- range $t.queues }}{{ $read = append $read .name }}{{ $write = append $write .name }}{{ end }}
{{- range $t.exchanges }}{{ $read = append $read .name }}{{ end }}
{{- end }}
configure: {{ ternary (include "sms-bridge.namesPattern" $configure) "^$" (not (empty $configure)) | quote }}
write: {{ include "sms-bridge.namesPattern" (uniq $write) | quote }}
read: {{ ternary (include "sms-bridge.namesPattern" (uniq $read)) "^$" (not (empty $read)) | quote }}
{{- end }}
