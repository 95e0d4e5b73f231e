{{/* Refuses combinations of values that cannot work; each failure is one sentence that says what to change. */}}

{{- define "headrace.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | int -}}
{{- hasSuffix "Gi" . | ternary (mul $number 1024) $number -}}
{{- end }}

{{- define "headrace.checks" -}}
{{- $values := .Values -}}
{{- $groups := include "headrace.groups" . | fromJson -}}
{{- if not $groups -}}{{- fail "workers has no group, so no replica could be placed: add one, such as workers: {serving: {}}" -}}{{- end -}}
{{- $pods := 0 -}}
{{- range $groups -}}{{- $pods = add $pods (int .replicas) -}}{{- end -}}
{{- if and $values.cache.enabled (ne $values.cache.accessMode "ReadWriteMany") (gt (int $pods) 1) -}}
{{- fail (printf "cache.accessMode is %s, but %d worker pods share the cache: use ReadWriteMany, or cache.enabled: false" $values.cache.accessMode (int $pods)) -}}
{{- end -}}
{{- if and $values.router.autoscaling.enabled (gt (int $values.router.autoscaling.min) (int $values.router.autoscaling.max)) -}}
{{- fail "router.autoscaling.min is above router.autoscaling.max: lower min, or raise max" -}}
{{- end -}}
{{- if and $values.gateway.enabled (not $values.gateway.parentRefs) -}}
{{- fail "gateway.enabled needs a Gateway: name it in gateway.parentRefs, such as [{name: public}]" -}}
{{- end -}}
{{- if and $values.tls.clientCa (not $values.tls.existingSecret) -}}
{{- fail "tls.clientCa needs tls.existingSecret: name a Secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and $values.admin.enabled (not $values.tls.existingSecret) -}}
{{- fail "admin.enabled sends the admin key over the network, so it needs tls.existingSecret: name a Secret with tls.crt and tls.key" -}}
{{- end -}}
{{- if and $values.tls.clientCa (or $values.ingress.enabled $values.gateway.enabled) -}}
{{- fail "tls.clientCa requires the client's own certificate, which an Ingress or Gateway does not pass on: verify client certificates there, or turn ingress and gateway off" -}}
{{- end -}}
{{- if $values.gateway.enabled -}}
{{- if $values.tls.existingSecret -}}
{{- fail "a Gateway sends requests to the routers in clear text: end TLS at the Gateway, and leave tls.existingSecret empty" -}}
{{- end -}}
{{- if and $values.gateway.grpcHostnames (not $values.gateway.hostnames) -}}
{{- fail "gateway.grpcHostnames needs gateway.hostnames: without them HTTP has all hosts, and a Gateway accepts only one of two routes for the same host" -}}
{{- end -}}
{{- range $values.gateway.grpcHostnames -}}
{{- if has . $values.gateway.hostnames -}}
{{- fail (printf "%s is in gateway.hostnames and in gateway.grpcHostnames, but a Gateway accepts only one of two routes for the same host: give gRPC its own" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $values.monitoring.podMonitor $values.networkPolicy.enabled (not $values.networkPolicy.monitoring) -}}
{{- fail "monitoring.podMonitor needs networkPolicy.monitoring: name the peers that may read metrics, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" -}}
{{- end -}}
{{- $own := list -}}
{{- range (include "headrace.rayEnv" (mustMergeOverwrite (deepCopy .) (dict "Values" (mustMergeOverwrite (deepCopy $values) (dict "extra" (dict "env" list)))))) | fromYamlArray -}}
{{- $own = append $own .name -}}
{{- end -}}
{{- range $values.extra.env -}}
{{- if has .name $own -}}
{{- fail (printf "extra.env sets %s, which the chart sets itself: remove it; HF_HOME follows from cache, HF_HUB_OFFLINE from hub.offline" .name) -}}
{{- end -}}
{{- end -}}
{{- $mounts := list -}}
{{- if $values.models.existingClaim -}}{{- $mounts = append $mounts $values.models.mountPath -}}{{- end -}}
{{- range $values.extra.volumeMounts -}}{{- $mounts = append $mounts .mountPath -}}{{- end -}}
{{- range $name, $group := $groups -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $key, $_ := get $group.resources $kind | default dict -}}
{{- if or (has $key (list "cpu" "memory" $group.gpuResource)) (hasSuffix "/gpu" $key) -}}
{{- fail (printf "workers.%s.resources.%s has %s, of which Ray would not know: set cpus, memory or gpus of the group (and gpuResource) instead" $name $kind $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $values.spec.models | default list -}}
{{- $source := .source | default "" -}}
{{- if hasPrefix "/" $source -}}
{{- $mounted := false -}}
{{- range $mounts -}}{{- if hasPrefix (printf "%s/" (trimSuffix "/" .)) (printf "%s/" $source) -}}{{- $mounted = true -}}{{- end -}}{{- end -}}
{{- if not $mounted -}}
{{- fail (printf "no volume of the workers is mounted at the source %s: set models.existingClaim, whose folders are below %s, or extra.volumes and extra.volumeMounts" $source $values.models.mountPath) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $needs := dict -}}
{{- range $model := $values.spec.models | default (list dict) -}}
{{- $shape := dict "model" ($model.name | default $model.source | default "smollm2") "device" ($model.device | default "auto") "share" ($model.cpu_share | default 0.05) -}}
{{- $pools := list (merge (dict "replicas" ($model.replicas | default 1) "labels" ($model.node_labels | default dict) "tp" ($model.tp | default 1) "pp" ($model.pp | default 1)) $shape) -}}
{{- if and (kindIs "map" $model.prefill) (kindIs "map" $model.decode) -}}
{{- $pools = list -}}
{{- range list $model.prefill $model.decode -}}
{{- $pools = append $pools (merge (dict "replicas" (.replicas | default 1) "labels" (kindIs "map" .node_labels | ternary .node_labels ($model.node_labels | default dict)) "tp" (.tp | default $model.tp | default 1) "pp" (.pp | default $model.pp | default 1)) $shape) -}}
{{- end -}}
{{- end -}}
{{- range $pools -}}
{{- include "headrace.poolChecks" (list . $groups $needs) -}}
{{- end -}}
{{- end -}}
{{- range $where, $need := $needs -}}
{{- $has := 0 -}}
{{- range splitList " " $where -}}{{- $group := get $groups . -}}{{- $has = add $has (mul (int $group.gpus) (int $group.replicas)) -}}{{- end -}}
{{- if gt (int $need) (int $has) -}}
{{- fail (printf "the models on workers.%s need %d GPUs, but these pods have %d: raise replicas or gpus there, or lower replicas, tp or pp in spec.models" (replace " " " and workers." $where) (int $need) (int $has)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Arguments: (list POOL GROUPS NEEDS); NEEDS: GPUs by the names of the groups, counted here. */}}
{{- define "headrace.poolChecks" -}}
{{- $pool := index . 0 -}}
{{- $groups := index . 1 -}}
{{- $needs := index . 2 -}}
{{- $tp := int $pool.tp -}}
{{- $label := get $pool.labels "headrace.dev/group" | default "" -}}
{{- $names := keys $groups | sortAlpha -}}
{{- if $label -}}
{{- $listed := regexFindAll "[a-z][a-z0-9-]*" (regexReplaceAll "^in\\(" $label "") -1 -}}
{{- range $listed -}}
{{- if not (hasKey $groups .) -}}
{{- fail (printf "the node_labels of %s name the group '%s', but workers has only %s: add the group, or name one of these" $pool.model . (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- $placed := list -}}
{{- range $names -}}{{- if ne (hasPrefix "!" $label) (has . $listed) -}}{{- $placed = append $placed . -}}{{- end -}}{{- end -}}
{{- $names = $placed -}}
{{- end -}}
{{- $gpuNames := list -}}
{{- range $names -}}{{- if gt (int (get $groups .).gpus) 0 -}}{{- $gpuNames = append $gpuNames . -}}{{- end -}}{{- end -}}
{{- $onGpus := and (ne $pool.device "cpu") (gt (len $gpuNames) 0) -}}
{{- if and (eq $pool.device "cuda") (not $onGpus) -}}
{{- fail (printf "%s has device: cuda, but no group where it may run has GPUs: set gpus of workers.%s" $pool.model (join ", " $names)) -}}
{{- end -}}
{{- if $onGpus -}}{{- $names = $gpuNames -}}{{- end -}}
{{- $fits := 0 -}}
{{- range $name := $names -}}
{{- $group := get $groups $name -}}
{{- if and (gt $tp 1) (lt (include "headrace.mebibytes" $group.shm | int) 1024) -}}
{{- fail (printf "workers.%s.shm is %s, but the %d ranks of %s communicate through it: set 1Gi or more" $name $group.shm $tp $pool.model) -}}
{{- end -}}
{{- if $onGpus -}}
{{- $fits = add $fits (mul (int $group.replicas) (div (int $group.gpus) $tp)) -}}
{{- else -}}
{{- $cpus := mulf $pool.share $tp -}}
{{- $fits = add $fits (mul (int $group.replicas) (floor (divf $group.cpus $cpus) | int)) -}}
{{- end -}}
{{- end -}}
{{- $where := join " and workers." $names -}}
{{- if lt (int $fits) (mul (int $pool.replicas) (int $pool.pp) | int) -}}
{{- $each := $onGpus | ternary (printf "%d GPUs" $tp) (printf "%v CPUs" (mulf $pool.share $tp)) -}}
{{- fail (printf "%s needs %d times %s, each within one pod, but there is room for %d in workers.%s: raise replicas or %s there, or lower replicas, %stp or pp in spec.models" $pool.model (mul (int $pool.replicas) (int $pool.pp) | int) $each (int $fits) $where ($onGpus | ternary "gpus" "cpus") ($onGpus | ternary "" "cpu_share, ")) -}}
{{- end -}}
{{- if $onGpus -}}
{{- $key := join " " $names -}}
{{- $_ := set $needs $key (add (get $needs $key | default 0) (mul (int $pool.replicas) $tp (int $pool.pp)) | int) -}}
{{- end -}}
{{- end }}
