{{/* Names, labels, images and the parts that several pods share. */}}

{{- define "headrace.fullname" -}}
{{- $name := default "headrace" .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride | default (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $full) -}}
{{- fail (printf "the full name '%s' must start with a lowercase letter and hold only lowercase letters, digits and hyphens: set fullnameOverride" $full) -}}
{{- end -}}
{{- if gt (len $full) 40 -}}
{{- fail (printf "the full name '%s' has %d characters, and names that KubeRay derives from it allow 40: set fullnameOverride" $full (len $full)) -}}
{{- end -}}
{{- $full -}}
{{- end }}

{{- define "headrace.keys" -}}
{{- .Values.auth.existingSecret | default (printf "%s-keys" (include "headrace.fullname" .)) -}}
{{- end }}

{{/* Arguments: (list . COMPONENT). */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* No app.kubernetes.io/name: KubeRay sets its own on the pods of Ray and selects the head by it. */}}
{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/part-of: headrace
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end }}

{{- define "headrace.meta" -}}
name: {{ include "headrace.fullname" (index . 0) }}{{ index . 2 }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "headrace.labels" . | nindent 2 }}
{{- end }}

{{/* The image and its pull policy. Arguments: (list . KEY of .Values.image). */}}
{{- define "headrace.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- $name := get $image (index . 1) -}}
{{- if $image.registry -}}{{- $name = printf "%s/%s" (trimSuffix "/" $image.registry) $name -}}{{- end -}}
{{- $digest := get $image.digest (index . 1) -}}
image: {{ not (empty $digest) | ternary (printf "%s@%s" $name $digest) (printf "%s:%s" $name ($image.tag | default (index . 0).Chart.AppVersion)) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end }}

{{/* What the spec of every pod begins with. Arguments: (list . VALUES of the pod). */}}
{{- define "headrace.pod" -}}
{{- $root := index . 0 -}}
{{- $own := index . 1 -}}
enableServiceLinks: false
automountServiceAccountToken: {{ not (empty $own.serviceAccountName) }}
{{- with $own.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with $own.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Arguments: (dict "readOnly" BOOL "add" CAPABILITIES). */}}
{{- define "headrace.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: {{ .readOnly }}
  capabilities:
    drop: [ALL]
    {{- with .add }}
    add: {{ toJson . }}
    {{- end }}
{{- end }}

{{/* HEADRACE_HOME is a folder below the volume: the volume itself is writable by all, which is refused. */}}
{{- define "headrace.env" -}}
- {name: HOME, value: /var/lib/headrace/home}
- {name: USER, value: headrace}
- {name: HEADRACE_HOME, value: /var/lib/headrace/state}
- {name: XDG_CACHE_HOME, value: /var/lib/headrace/home/.cache}
- {name: TRITON_CACHE_DIR, value: /var/lib/headrace/home/.triton}
- {name: HUMMING_CACHE_DIR, value: /var/lib/headrace/home/.humming}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /var/lib/headrace/home/.inductor}
{{- end }}

{{/* The end of a container's env, and its envFrom: of several variables with one name the last one counts.
Arguments: (list . VALUES of the pod). */}}
{{- define "headrace.ownEnv" -}}
{{- $extra := (index . 0).Values.extra -}}
{{- with concat $extra.env (index . 1).env }}
{{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat $extra.envFrom (index . 1).envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Of every process of Ray and of the controller; a Ray that `headrace serve` starts sets the same itself. */}}
{{- define "headrace.rayEnv" -}}
{{ include "headrace.env" . }}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "86400"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_ENABLE_UV_RUN_RUNTIME_ENV, value: "0"}
- {name: RAY_ROTATION_MAX_BYTES, value: "16777216"}
- {name: RAY_ROTATION_BACKUP_COUNT, value: "1"}
- {name: RAY_memory_monitor_refresh_ms, value: "0"}
- {name: HF_HOME, value: {{ .Values.cache.enabled | ternary "/hub" "/var/lib/headrace/home/hub" }}}
- {name: HF_HUB_OFFLINE, value: {{ .Values.hub.offline | ternary "1" "0" | quote }}}
{{- if .Values.hub.existingSecret }}
- {name: HF_TOKEN_PATH, value: /etc/headrace/hub/token}
{{- end }}
{{- end }}

{{- define "headrace.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: state, mountPath: /var/lib/headrace}
{{- with .Values.extra.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "headrace.rayMounts" -}}
{{ include "headrace.mounts" . }}
- {name: shm, mountPath: /dev/shm}
{{- if .Values.hub.existingSecret }}
- {name: hub, mountPath: /etc/headrace/hub, readOnly: true}
{{- end }}
{{- end }}

{{- define "headrace.volumes" -}}
- {name: tmp, emptyDir: {}}
- {name: state, emptyDir: {}}
{{- with .Values.extra.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Arguments: (list . SIZE of /dev/shm). */}}
{{- define "headrace.rayVolumes" -}}
{{- $values := (index . 0).Values -}}
{{ include "headrace.volumes" (index . 0) }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ index . 1 }}}}
{{- with $values.hub.existingSecret }}
- {name: hub, secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: token, path: token}]}}
{{- end }}
{{- end }}

{{/* Only the named keys of the Secret are in the volume. Arguments: (list . KEY…). */}}
{{- define "headrace.keyVolume" -}}
- name: keys
  secret:
    secretName: {{ include "headrace.keys" (index . 0) }}
    defaultMode: 0440
    items:
      {{- range rest . }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}

{{/* Arguments: (list . CLIENT-CA). */}}
{{- define "headrace.tlsVolume" -}}
- name: tls
  secret:
    secretName: {{ (index . 0).Values.tls.existingSecret }}
    defaultMode: 0440
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      {{- if index . 1 }}
      - {key: ca.crt, path: ca.crt}
      {{- end }}
{{- end }}

{{/* One key of the ConfigMap. Arguments: (list . KEY). */}}
{{- define "headrace.configVolume" -}}
- name: config
  configMap:
    name: {{ include "headrace.fullname" (index . 0) }}-config
    items:
      - {key: {{ index . 1 }}, path: {{ index . 1 }}}
{{- end }}

{{/* Of the agent of a node of Ray: it answers without the token. No probe waits for a model. */}}
{{- define "headrace.rayProbes" -}}
startupProbe:
  httpGet: {path: /api/healthz, port: agent}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /api/healthz, port: agent}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 10
{{- end }}

{{/* Ports of Ray are fixed, so that a firewall can name them; 8080 and 10001 are outside of the workers' range. */}}
{{- define "headrace.rayParams" -}}
node-manager-port: "6380"
object-manager-port: "6381"
dashboard-agent-listen-port: "52365"
dashboard-agent-grpc-port: "52366"
runtime-env-agent-port: "52367"
metrics-export-port: "8080"
min-worker-port: "10002"
max-worker-port: "19999"
object-store-memory: "104857600"
{{- end }}

{{/* All groups by name as JSON, each with the defaults. */}}
{{- define "headrace.groups" -}}
{{- $groups := dict -}}
{{- range $name, $own := .Values.workers -}}
{{- $_ := set $groups $name (mustMergeOverwrite (deepCopy $.Values.workerDefaults) ($own | default dict)) -}}
{{- end -}}
{{- toJson $groups -}}
{{- end }}

{{/* Whole seconds that a request may take. */}}
{{- define "headrace.requestSeconds" -}}
{{- $seconds := ((.Values.spec).limits).request_seconds -}}
{{- if not $seconds -}}
{{- fail "spec.limits.request_seconds is not set, and the pods' grace periods are derived from it: set the longest time of a request, such as 600" -}}
{{- end -}}
{{- ceil $seconds | int -}}
{{- end }}
