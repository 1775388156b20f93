{{- /* What names of objects begin with: the release's name, so that those of an existing release stay. */}}
{{- define "imds-bridge.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if and .Values.nameOverride (not (contains .Values.nameOverride .Release.Name)) -}}
{{ .Release.Name }}-{{ .Values.nameOverride }}
{{- else -}}
{{ .Release.Name }}
{{- end }}
{{- end }}

{{- /* Refuse items of which two have the same key. */}}
{{- define "imds-bridge.refuseTwice" }}
{{- $seen := dict }}
{{- range .items }}
{{- $key := get . $.key }}
{{- if hasKey $seen $key }}
{{- fail (printf "%s: %s %q is there twice; the manifests have one, or the value repeats it" $.value $.key $key) }}
{{- end }}
{{- $_ := set $seen $key true }}
{{- end }}
{{- end }}

{{- /* Refuse values that cannot work together. */}}
{{- define "imds-bridge.refuse" }}
{{- $ours := list ".helmignore" "README.md" "check.yaml" "kustomization.yaml" "namespace.yaml" "rules.yaml" "serviceaccounts.yaml" }}
{{- range $role := list "forward" "listen" "drain" "relay" }}
{{- $ours = concat $ours (list (printf "%s.yaml" $role) (printf "%s.toml" $role)) }}
{{- end }}
{{- range $file, $_ := .Files }}
{{- if not (has $file $ours) }}
{{- fail (printf "%s is in the chart's folder, so Helm would pack it and keep it in each release's Secret: move it elsewhere" $file) }}
{{- end }}
{{- end }}
{{- $forward := .Values.forward }}
{{- $drain := .Values.drain }}
{{- if not (or $forward.enabled .Values.listen.enabled $drain.enabled .Values.relay.enabled) }}
{{- fail "nothing is enabled: enable forward, listen, drain or relay" }}
{{- end }}
{{- $tag := .Values.image.tag }}
{{- if and $drain.enabled (or $drain.cordonOnly (not $drain.force) $drain.condition $drain.excludeFromLoadBalancers) (not .Values.image.digest) (regexMatch "^v?[0-9]+[.][0-9]+[.][0-9]+" $tag) }}
{{- if semverCompare (printf "<%s" .Chart.AppVersion) $tag }}
{{- fail (printf "image.tag: %s does not know the variables that drain.force=false, cordonOnly, condition and excludeFromLoadBalancers set; use %s or later" $tag .Chart.AppVersion) }}
{{- end }}
{{- end }}
{{- range $role := list "forward" "listen" }}
{{- $other := index $.Values $role }}
{{- if and $other.enabled $drain.enabled }}
{{- $apart := or $other.affinity $drain.affinity }}
{{- range $key, $value := $other.nodeSelector }}
{{- $apart = or $apart (ne $value (get $drain.nodeSelector $key | default $value)) }}
{{- end }}
{{- if not $apart }}
{{- fail (printf "drain has a %s of its own, and a node must not have two: set %s.enabled=false, or give both a nodeSelector with one key and different values, or an affinity" $role $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.relay.enabled (gt (int (dig "spec" "replicas" 1 (.Values.relay.patch.Deployment | default dict))) 1) }}
{{- fail "relay.patch: a relay holds its state alone, so it has one replica" }}
{{- end }}
{{- range $role := list "forward" "listen" "drain" "relay" }}
{{- $own := index $.Values $role }}
{{- if and $own.existingConfigMap $own.config }}
{{- fail (printf "%s.existingConfigMap takes the place of config: give one of them" $role) }}
{{- end }}
{{- if not (or $own.serviceAccount.create $own.serviceAccount.name) }}
{{- fail (printf "%s.serviceAccount: with create=false, give the name of the account to use" $role) }}
{{- end }}
{{- $patched := dig "spec" "template" "spec" dict ($own.patch.DaemonSet | default $own.patch.Deployment | default dict) }}
{{- range list "containers" "initContainers" "volumes" }}
{{- if hasKey $patched . }}
{{- fail (printf "%s.patch: a list is replaced, so a patch of %s would lose what the manifest has; use the values env, resources, volumes and volumeMounts of %s, or kustomize" $role . $role) }}
{{- end }}
{{- end }}
{{- $strategy := dig "spec" "updateStrategy" $own.updateStrategy ($own.patch.DaemonSet | default dict) }}
{{- if dig "rollingUpdate" "maxSurge" 0 $strategy }}
{{- fail (printf "%s: maxSurge starts a pod beside the old one, which holds the state of the node, so it would never run: use maxUnavailable" $role) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The text of a configuration, from a role and the name of its Secret. */}}
{{- define "imds-bridge.config" -}}
{{- $own := index .root.Values .role }}
{{- $config := $own.config | default (.root.Files.Get (printf "%s.toml" .role) | replace (printf "imds-bridge-%s" .role) .secret) }}
{{- $config }}
{{- end }}

{{- /* Change a DaemonSet or Deployment as the values of its role say; names has those of other objects. */}}
{{- define "imds-bridge.workload" }}
{{- $own := index .root.Values .role }}
{{- $names := .names }}
{{- $template := .it.spec.template }}
{{- $pod := $template.spec }}
{{- $_ := set .it.spec.selector "matchLabels" (merge dict .instance .it.spec.selector.matchLabels) }}
{{- $_ := set $template.metadata "labels" (merge dict .instance $template.metadata.labels $own.podLabels .root.Values.commonLabels) }}
{{- with $own.podAnnotations }}{{ $_ := set $template.metadata "annotations" . }}{{ end }}
{{- with $own.updateStrategy }}{{ $_ := set $.it.spec "updateStrategy" . }}{{ end }}
{{- with .root.Values.imagePullSecrets }}{{ $_ := set $pod "imagePullSecrets" . }}{{ end }}
{{- with $own.tolerations }}{{ $_ := set $pod "tolerations" . }}{{ end }}
{{- with $own.priorityClassName }}{{ $_ := set $pod "priorityClassName" . }}{{ end }}
{{- with $own.affinity }}{{ $_ := set $pod "affinity" (mergeOverwrite ($pod.affinity | default dict) .) }}{{ end }}
{{- $_ := set $pod "nodeSelector" (merge dict $pod.nodeSelector $own.nodeSelector) }}
{{- $_ := set $pod "serviceAccountName" $names.account }}
{{- range $pod.volumes }}
{{- with .configMap }}{{ $_ := set . "name" $names.configMap }}{{ end }}
{{- with .secret }}{{ $_ := set . "secretName" $names.secret }}{{ end }}
{{- end }}
{{- $_ := set $pod "volumes" (concat $pod.volumes $own.volumes) }}
{{- include "imds-bridge.refuseTwice" (dict "items" $pod.volumes "key" "name" "value" (printf "%s.volumes" .role)) }}
{{- $image := .root.Values.image }}
{{- $tagged := printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) }}
{{- range $one := concat ($pod.initContainers | default list) $pod.containers }}
{{- $_ := set $one "image" (ternary (printf "%s@%s" $image.repository $image.digest) $tagged (ne $image.digest "")) }}
{{- with $image.pullPolicy }}{{ $_ := set $one "imagePullPolicy" . }}{{ end }}
{{- $_ := set $one "resources" (mergeOverwrite dict $one.resources (deepCopy $own.resources)) }}
{{- end }}
{{- range $index, $one := $pod.containers }}
{{- $first := ternary (list (first $one.args)) $one.args (contains "\"--config" (toJson $own.extraArgs)) }}
{{- $arguments := concat $first (ternary (list "--dry-run") list (and (eq $one.name "listen") $own.dryRun)) $own.extraArgs }}
{{- $_ := set $one "args" $arguments }}
{{- $switches := list }}
{{- if eq $.role "drain" }}
{{- if not $own.force }}{{ $switches = append $switches (dict "name" "DRAIN_FORCE" "value" "false") }}{{ end }}
{{- if $own.cordonOnly }}{{ $switches = append $switches (dict "name" "DRAIN_CORDON_ONLY" "value" "true") }}{{ end }}
{{- end }}
{{- if and (eq $.role "drain") $own.excludeFromLoadBalancers }}{{ $switches = append $switches (dict "name" "DRAIN_EXCLUDE_FROM_LOAD_BALANCERS" "value" "true") }}{{ end }}
{{- if and (eq $.role "drain") (eq $one.name "forward") $own.condition }}
{{- /* A sink of forward by variables, so that it goes with existingConfigMap, too. */}}
{{- $switches = append $switches (dict "name" "NODE_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "spec.nodeName"))) }}
{{- $sink := dict "KIND" "exec" "RUN" (list "/opt/imds-bridge/bin/python" "/opt/imds-bridge/drain.py" "tell" | toJson) "TYPES" (list "io.imdsbridge.document.changed.v1" | toJson) }}
{{- range $key, $value := $sink }}{{ $switches = append $switches (dict "name" (printf "IMDS_BRIDGE__SINKS__NODE_CONDITION__%s" $key) "value" $value) }}{{ end }}
{{- end }}
{{- $env := concat ($one.env | default list) $switches $own.env }}
{{- $port := "" }}
{{- if $own.podMonitor.enabled }}
{{- $port = add $own.podMonitor.port $index }}
{{- $env = append $env (dict "name" "IMDS_BRIDGE__METRICS__LISTEN" "value" (printf "0.0.0.0:%d" $port)) }}
{{- $_ := set $one "ports" (list (dict "name" $one.name "containerPort" $port)) }}
{{- else if and $pod.hostNetwork (ne $.role "drain") (not (contains "IMDS_BRIDGE__METRICS" (toJson $env))) }}
{{- /* Without comments and strings of several lines, whose text is no table. */}}
{{- $plain := regexReplaceAll `(?s)#[^\n]*|"""(?:\\.|[^\\])*?"""|'''.*?'''|("(?:\\.|[^"\\\n])*"|'[^'\n]*')` $.config "${1}" }}
{{- $metrics := regexFind `(?m)^\[metrics\][^\[]*?^listen *= *"(127\.0\.0\.1|0\.0\.0\.0|localhost):[0-9]+"` $plain }}
{{- with regexFind `[0-9]+"$` $metrics }}{{ $port = trimSuffix "\"" . | int }}{{ end }}
{{- end }}
{{- if $port }}
{{- /*
The kubelet asks by itself whether it is ready, since a program for each probe costs nine tenths of the CPU. Whether it
is alive, a program finds out, which reads the status where another process has the port.
*/}}
{{- $env = append $env (dict "name" "IMDS_BRIDGE__METRICS__NEXT_PORT" "value" "false") }}
{{- $ask := merge (dict "path" (printf "/readyz?role=%s" $one.name) "port" $port) (ternary (dict "host" "127.0.0.1") dict ($pod.hostNetwork | default false)) }}
{{- $_ := set $one "readinessProbe" (merge (dict "httpGet" $ask) (omit $one.readinessProbe "exec")) }}
{{- end }}
{{- with $env }}{{ $_ := set $one "env" . }}{{ end }}
{{- $_ := set $one "volumeMounts" (concat $one.volumeMounts $own.volumeMounts) }}
{{- include "imds-bridge.refuseTwice" (dict "items" $env "key" "name" "value" (printf "%s.env" $.role)) }}
{{- include "imds-bridge.refuseTwice" (dict "items" $one.volumeMounts "key" "mountPath" "value" (printf "%s.volumeMounts" $.role)) }}
{{- end }}
{{- end }}

{{- /*
A Job that tries the new configuration before anything changes, from the pod template of a role: a DaemonSet also
replaces pods that are not ready, whatever maxUnavailable says.
*/}}
{{- define "imds-bridge.check" }}
{{- $template := deepCopy .template }}
{{- $pod := $template.spec }}
{{- $hash := list .template .map | toJson | sha256sum | trunc 10 }}
{{- $name := printf "%s-check-%s" .name $hash }}
{{- $run := `imds-bridge "$@" && exit; code=$?; echo "Nothing was changed. If a Secret is created by this same sync: checkConfig.enabled=false" >&2; exit $code` }}
{{- $hook := dict "helm.sh/hook" "pre-install,pre-upgrade" "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded" }}
{{- $_ := set $template "metadata" (dict "labels" .labels) }}
{{- range list "initContainers" "hostNetwork" "dnsPolicy" "serviceAccountName" "terminationGracePeriodSeconds" }}
{{- $_ := unset $pod . }}
{{- end }}
{{- $_ := set $pod "automountServiceAccountToken" false }}
{{- $_ := set $pod "restartPolicy" "Never" }}
{{- range $pod.volumes }}
{{- if eq .name "state" }}{{ $_ := set (unset (unset . "hostPath") "persistentVolumeClaim") "emptyDir" dict }}{{ end }}
{{- if and (eq .name "config") $.map }}{{ $_ := set . "configMap" (dict "name" $name) }}{{ end }}
{{- end }}
{{- range $one := $pod.containers }}
{{- $file := "/etc/imds-bridge/config.toml" }}
{{- range $index, $word := $one.args }}
{{- if eq $word "--config" }}{{ $file = index $one.args (add1 $index) }}{{ end }}
{{- if hasPrefix "--config=" $word }}{{ $file = trimPrefix "--config=" $word }}{{ end }}
{{- end }}
{{- $_ := set $one "args" (list "imds-bridge" "config" "check" "--role" (first $one.args) $file) }}
{{- $_ := set $one "command" (list "sh" "-c" $run) }}
{{- range list "startupProbe" "livenessProbe" "readinessProbe" "ports" }}{{ $_ := unset $one . }}{{ end }}
{{- end }}
{{- with .map }}
---
{{ dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" (dict "name" $name "namespace" $.root.Release.Namespace "labels" $.labels "annotations" (merge (dict "helm.sh/hook-weight" "-1") $hook)) "data" .data | toYaml }}
{{- end }}
---
{{ dict "apiVersion" "batch/v1" "kind" "Job" "metadata" (dict "name" $name "namespace" .root.Release.Namespace "labels" .labels "annotations" (merge (dict "helm.sh/hook-output-log-policy" "hook-failed") $hook)) "spec" (dict "backoffLimit" 0 "activeDeadlineSeconds" 120 "ttlSecondsAfterFinished" 600 "template" $template) | toYaml }}
{{- end }}
