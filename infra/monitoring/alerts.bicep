// Generated from rules.yaml: python -m infra.monitoring.generate
metadata description = 'The alerts of imds-bridge for an Azure Monitor workspace that scrapes its metrics.'

@description('Resource id of the Azure Monitor workspace.')
param workspaceId string

@description('Resource ids of the action groups that are notified.')
param actionGroupIds string[] = []

@description('Where the page docs/operations.md is; each alert links to its section.')
param runbookUrl string = 'docs/operations.md'

param location string = resourceGroup().location
param tags object = {}

var actions = [for id in actionGroupIds: {
  actionGroupId: id
}]

resource alerts1 'Microsoft.AlertsManagement/prometheusRuleGroups@2023-03-01' = {
  name: 'imds-bridge'
  location: location
  tags: tags
  properties: {
    description: 'Alerts of imds-bridge'
    enabled: true
    interval: 'PT1M'
    scopes: [
      workspaceId
    ]
    rules: [
      {
        alert: 'ImdsBridgeSilent'
        expression: 'label_replace(up{job=~"imds-bridge.*"} == 0, "host", "$1", "instance", "(.+?)(:[0-9]+)?") unless on (host) label_replace(max_over_time(imds_bridge_imminent_events{type!="Freeze",instance!~"(127[.]|localhost|.::1).*"}[15m]) > 0, "host", "$1", "instance", "(.+?)(:[0-9]+)?")'
        for: 'PT2M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'imds-bridge on {{ $labels.instance }} does not answer'
          description: 'Nothing reads the Scheduled Events of this VM, the host in the label instance, or nothing approves them.'
          runbook_url: '${runbookUrl}#imdsbridgesilent'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeTargetGone'
        expression: 'label_replace(max by (job, instance) (last_over_time(up{job=~"imds-bridge.*"}[1h])) == 1 unless on (job, instance) up, "host", "$1", "instance", "(.+?)(:[0-9]+)?") unless on (host) label_replace(max_over_time(imds_bridge_imminent_events{type!="Freeze",instance!~"(127[.]|localhost|.::1).*"}[1h]) > 0, "host", "$1", "instance", "(.+?)(:[0-9]+)?") unless on (job) count by (job) (up{job=~"imds-bridge.*"}) >= quantile_over_time(0.5, count by (job) (up{job=~"imds-bridge.*"})[1h:1m])'
        for: 'PT5M'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'Prometheus does not scrape imds-bridge on {{ $labels.instance }} any more'
          description: 'It answered until the target went away, or the agent on the host in the label instance sends nothing.'
          runbook_url: '${runbookUrl}#imdsbridgetargetgone'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeSharedInstance'
        expression: 'max by (job, instance) (imds_bridge_start_time_seconds{job=~"imds-bridge.*"}) - min by (job, instance) (imds_bridge_start_time_seconds{job=~"imds-bridge.*"}) > 0 or max by (job, instance) (resets(imds_bridge_start_time_seconds{job=~"imds-bridge.*"}[15m])) > 2'
        for: 'PT5M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'several processes share the job {{ $labels.job }} and the instance {{ $labels.instance }}'
          description: 'Alerts cannot tell their VMs apart, and may not fire. Set the label instance to the host\'s name and port.'
          runbook_url: '${runbookUrl}#imdsbridgesharedinstance'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeNoTargets'
        expression: 'absent(up{job=~"imds-bridge.*"})'
        for: 'PT5M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'Prometheus scrapes no imds-bridge'
          description: 'No other alert of imds-bridge can fire.'
          runbook_url: '${runbookUrl}#imdsbridgenotargets'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeImdsUnreachable'
        expression: 'imds_bridge_imds_last_good_answer_age_seconds > 60'
        for: 'PT1M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'imds-bridge on {{ $labels.instance }} gets no valid answer from IMDS'
          description: 'The last valid answer is {{ $value }} s old. A notice would not be seen, or not approved.'
          runbook_url: '${runbookUrl}#imdsbridgeimdsunreachable'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeImdsSlow'
        expression: 'rate(imds_bridge_poll_duration_seconds_sum[5m]) / rate(imds_bridge_poll_duration_seconds_count[5m]) > 2 and on (job, instance) imds_bridge_imds_last_good_answer_age_seconds < 60'
        for: 'PT5M'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'IMDS needs {{ $value }} s for each answer to {{ $labels.instance }}'
          description: 'A notice is seen as late as that. It usually needs milliseconds.'
          runbook_url: '${runbookUrl}#imdsbridgeimdsslow'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeImdsFails'
        expression: 'sum by (job, instance) (rate(imds_bridge_polls_total{result!="answered"}[5m])) / sum by (job, instance) (rate(imds_bridge_polls_total[5m])) > 0.5 and on (job, instance) imds_bridge_imds_last_good_answer_age_seconds < 60'
        for: 'PT5M'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'IMDS fails to answer {{ $labels.instance }} (share of the requests {{ $value }})'
          description: 'A notice is seen late. Usually another program on the VM asks too often (429).'
          runbook_url: '${runbookUrl}#imdsbridgeimdsfails'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeClock'
        expression: 'abs(imds_bridge_clock_ahead_seconds) > 30'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'the clock of {{ $labels.instance }} is {{ $value }} s away from IMDS\'s'
          description: 'Set it, and look at its synchronisation. Until then other alerts may be wrong, and commands may expire.'
          runbook_url: '${runbookUrl}#imdsbridgeclock'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeDryRun'
        expression: 'imds_bridge_dry_run == 1'
        for: 'PT60M'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'imds-bridge listen on {{ $labels.instance }} runs with --dry-run'
          description: 'Nothing is approved and no program is run. Restart it without the option.'
          runbook_url: '${runbookUrl}#imdsbridgedryrun'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeNoInstanceData'
        expression: 'imds_bridge_instance_data_available == 0'
        for: 'PT5M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'imds-bridge on {{ $labels.instance }} does not know which VM it is on'
          description: 'The listener approves and drains nothing. A chat gets no event that names this VM.'
          runbook_url: '${runbookUrl}#imdsbridgenoinstancedata'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeNoSinks'
        expression: '(imds_bridge_document_incarnation or on (job, instance) imds_bridge_bus_connected) unless on (job, instance) imds_bridge_sink_up{sink!="stdout"}'
        for: 'PT5M'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'imds-bridge on {{ $labels.instance }} has no sink in its configuration'
          description: 'Events are printed to its log and sent nowhere.'
          runbook_url: '${runbookUrl}#imdsbridgenosinks'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeStalled'
        expression: 'imds_bridge_loop_progress_age_seconds > 120'
        for: 'PT1M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'the loop {{ $labels.loop }} on {{ $labels.instance }} makes no progress'
          description: 'A supervisor with a watchdog restarts the process; without one, restart it.'
          runbook_url: '${runbookUrl}#imdsbridgestalled'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeRestarts'
        expression: 'changes(imds_bridge_start_time_seconds{job=~"imds-bridge.*"}[30m]) > 3 unless on (job, instance) imds_bridge_previous_run_stopped == 1'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'imds-bridge on {{ $labels.instance }} was started {{ $value }} times in 30 minutes'
          description: 'The last time, it had failed, or was killed. Its watchdog or its supervisor starts it again and again.'
          runbook_url: '${runbookUrl}#imdsbridgerestarts'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeSinkDown'
        expression: 'imds_bridge_sink_up == 0'
        for: 'PT5M'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'the sink {{ $labels.sink }} on {{ $labels.instance }} accepts nothing'
          description: 'Nothing is lost yet. Events are kept until max_age_seconds. A wrong clock (ImdsBridgeClock) can be the cause.'
          runbook_url: '${runbookUrl}#imdsbridgesinkdown'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeNoticeUndelivered'
        expression: 'imds_bridge_undelivered_notice_seconds < 300'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'the sink {{ $labels.sink }} on {{ $labels.instance }} has not delivered a notice'
          description: 'It takes effect in {{ $value }} s, or did so before if that is negative, unless ImdsBridgeClock fires.'
          runbook_url: '${runbookUrl}#imdsbridgenoticeundelivered'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeBacklog'
        expression: 'imds_bridge_oldest_waiting_seconds > 300'
        for: 'PT1M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'an event has waited {{ $value }} s for the sink {{ $labels.sink }} on {{ $labels.instance }}'
          description: 'Its receivers have not seen a change of this VM\'s Scheduled Events.'
          runbook_url: '${runbookUrl}#imdsbridgebacklog'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeSinkLeft'
        expression: 'imds_bridge_unconfigured_backlog_events > 0'
        for: 'PT5M'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: '{{ $value }} event(s) on {{ $labels.instance }} wait for {{ $labels.sink }}, which is not configured'
          description: 'Its name has changed, or it was removed. They become dead letters after a week.'
          runbook_url: '${runbookUrl}#imdsbridgesinkleft'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeDeadLetters'
        expression: 'imds_bridge_dead_letters > 0'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'the sink {{ $labels.sink }} on {{ $labels.instance }} has dead letters ({{ $value }})'
          description: 'The receiver refused these events, or they became too old. They are kept.'
          runbook_url: '${runbookUrl}#imdsbridgedeadletters'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeLoss'
        expression: 'increase(imds_bridge_losses_total[15m]) > 0 or (imds_bridge_losses_total > 0 and on (job, instance) time() - imds_bridge_start_time_seconds < 900)'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'imds-bridge on {{ $labels.instance }} has lost events ({{ $labels.reason }})'
          description: 'A bridge.loss event says how many, and of which time.'
          runbook_url: '${runbookUrl}#imdsbridgeloss'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeStorage'
        expression: 'imds_bridge_storage_available == 0'
        for: 'PT1M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'imds-bridge on {{ $labels.instance }} cannot write its state'
          description: 'New events may be kept in memory only. These are lost if the VM is stopped.'
          runbook_url: '${runbookUrl}#imdsbridgestorage'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
    ]
  }
}

resource alerts2 'Microsoft.AlertsManagement/prometheusRuleGroups@2023-03-01' = {
  name: 'imds-bridge-2'
  location: location
  tags: tags
  properties: {
    description: 'Alerts of imds-bridge'
    enabled: true
    interval: 'PT1M'
    scopes: [
      workspaceId
    ]
    rules: [
      {
        alert: 'ImdsBridgeShortNotice'
        expression: '( increase(imds_bridge_notice_seconds_bucket{type=~"Freeze|Reboot|Redeploy",le="300.0"}[15m]) > 0 or (imds_bridge_notice_seconds_bucket{type=~"Freeze|Reboot|Redeploy",le="300.0"} > 0 and on (job, instance) time() - imds_bridge_start_time_seconds < 900) ) unless on (job, instance) increase(imds_bridge_clock_jumps_total[15m]) > 0'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: '{{ $labels.instance }} got less than 5 minutes of notice of a {{ $labels.type }}'
          description: 'Azure documents at least 10 minutes. It was seen late, the host has failed, or the clock is wrong.'
          runbook_url: '${runbookUrl}#imdsbridgeshortnotice'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeApprovalsFail'
        expression: 'increase(imds_bridge_commands_total{outcome="failed"}[15m]) > 0 or (imds_bridge_commands_total{outcome="failed"} > 0 and on (job, instance) time() - imds_bridge_start_time_seconds < 900)'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'an approval failed on {{ $labels.instance }} ({{ $labels.reason }})'
          description: 'The policy allowed the command, but IMDS did not confirm the approval.'
          runbook_url: '${runbookUrl}#imdsbridgeapprovalsfail'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgePrepareFails'
        expression: 'increase(imds_bridge_prepared_total{result="failed"}[15m]) > 0 or (imds_bridge_prepared_total{result="failed"} > 0 and on (job, instance) time() - imds_bridge_start_time_seconds < 900)'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'the program of an auto rule failed on {{ $labels.instance }}'
          description: 'The VM is not prepared for an event. The program is tried again while the event is Scheduled.'
          runbook_url: '${runbookUrl}#imdsbridgepreparefails'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeStartedUnprepared'
        expression: 'increase(imds_bridge_started_unprepared_total[15m]) > 0 or (imds_bridge_started_unprepared_total > 0 and on (job, instance) time() - imds_bridge_start_time_seconds < 900)'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'an event of {{ $labels.instance }} started unprepared'
          description: 'An auto rule with a program matched the event, but the program had not succeeded before the start.'
          runbook_url: '${runbookUrl}#imdsbridgestartedunprepared'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeProgramFaults'
        expression: 'imds_bridge_program_faults > 0'
        for: 'PT5M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'imds-bridge on {{ $labels.instance }} cannot start a program that it will need'
          description: 'A program of an auto rule or of a sink is missing, or the process may not execute it.'
          runbook_url: '${runbookUrl}#imdsbridgeprogramfaults'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeRecoverFails'
        expression: 'increase(imds_bridge_recovered_total{result="failed"}[15m]) > 0 or (imds_bridge_recovered_total{result="failed"} > 0 and on (job, instance) time() - imds_bridge_start_time_seconds < 900)'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: '{{ $labels.instance }} is not put back to work: its program failed'
          description: 'The event is over, and `recover` of the auto rule fails. It is tried again with longer pauses.'
          runbook_url: '${runbookUrl}#imdsbridgerecoverfails'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeOutOfWork'
        expression: 'imds_bridge_out_of_work_seconds > 7200'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: '{{ $labels.instance }} is out of work for {{ $value | humanizeDuration }}'
          description: 'A program has prepared it for an event, and nothing has put it back. `imds-bridge status` says why.'
          runbook_url: '${runbookUrl}#imdsbridgeoutofwork'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeBadSignatures'
        expression: 'increase(imds_bridge_commands_total{reason="bad_signature"}[15m]) > 0 or (imds_bridge_commands_total{reason="bad_signature"} > 0 and on (job, instance) time() - imds_bridge_start_time_seconds < 900)'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'commands with a wrong signature reached {{ $labels.instance }}'
          description: 'A sender has an old secret, or somebody forges commands. They were refused.'
          runbook_url: '${runbookUrl}#imdsbridgebadsignatures'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeBusDown'
        expression: 'imds_bridge_bus_connected == 0'
        for: 'PT2M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'imds-bridge on {{ $labels.instance }} receives nothing from Service Bus'
          description: 'Commands wait in the queue, or the relay forwards nothing.'
          runbook_url: '${runbookUrl}#imdsbridgebusdown'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeVmsNotWatched'
        expression: 'imds_bridge_console_vms{state=~"silent|unreachable"} > 0'
        for: 'PT5M'
        severity: 1
        labels: {
          severity: 'critical'
        }
        annotations: {
          summary: 'the console on {{ $labels.instance }} knows {{ $value }} {{ $labels.state }} VM(s)'
          description: 'Nobody watches their Scheduled Events. The page Fleet names them.'
          runbook_url: '${runbookUrl}#imdsbridgevmsnotwatched'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
      {
        alert: 'ImdsBridgeVmsNeverHeard'
        expression: 'imds_bridge_console_vms{state="unheard"} > 0'
        for: 'PT60M'
        severity: 2
        labels: {
          severity: 'warning'
        }
        annotations: {
          summary: 'the console on {{ $labels.instance }} has never heard of {{ $value }} expected VM(s)'
          description: 'They are in the list of expected VMs, and imds-bridge may not be installed there. The page Fleet names them.'
          runbook_url: '${runbookUrl}#imdsbridgevmsneverheard'
        }
        resolveConfiguration: {
          autoResolved: true
          timeToResolve: 'PT10M'
        }
        actions: actions
      }
    ]
  }
}
