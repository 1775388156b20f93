<#
.SYNOPSIS
Drain this VM before an event: stop a service. Exit code 0 approves the event, any other one does not.
.EXAMPLE
run = ['C:\Windows\System32\WindowsPowerShell\v1.0\powershell.exe', '-NonInteractive', '-File', 'C:\Program Files\imds-bridge\drain.ps1', 'MyWorker']
#>
param([Parameter(Mandatory)] [string] $Service)
$ErrorActionPreference = 'Stop'
try {
    [Console]::OutputEncoding = [Text.Encoding]::UTF8
    Stop-Service $Service    # waits for its end; already stopped is fine: a drain may run twice
    Write-Output "$Service is stopped for the $env:IMDS_BRIDGE_EVENT_TYPE $env:IMDS_BRIDGE_EVENT_ID"
} catch {
    Write-Output "$Service cannot be stopped: $_"
    exit 1
}
exit 0
