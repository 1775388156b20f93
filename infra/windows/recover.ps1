<#
.SYNOPSIS
Put this VM back to work after an event: start a service. With another exit code than 0 it is tried again later.
.EXAMPLE
recover = ['C:\Windows\System32\WindowsPowerShell\v1.0\powershell.exe', '-NonInteractive', '-File', 'C:\Program Files\imds-bridge\recover.ps1', 'MyWorker']
#>
param([Parameter(Mandatory)] [string] $Service)
$ErrorActionPreference = 'Stop'
try {
    [Console]::OutputEncoding = [Text.Encoding]::UTF8
    Start-Service $Service    # already started is fine: an event may arrive twice
    Write-Output "$Service is started after the $env:IMDS_BRIDGE_EVENT_TYPE $env:IMDS_BRIDGE_EVENT_ID"
} catch {
    Write-Output "$Service cannot be started: $_"
    exit 75
}
exit 0
