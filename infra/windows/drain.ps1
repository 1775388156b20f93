<#
.SYNOPSIS
Drain this VM before an event: stop a service. Exit code 0 approves the event; after any other one the drain is repeated while there is time.
.EXAMPLE
run = ['C:\Windows\System32\WindowsPowerShell\v1.0\powershell.exe', '-NoProfile', '-NonInteractive', '-File', 'C:\Program Files\imds-bridge\drain.ps1', 'MyWorker']
#>
param([Parameter(Mandatory)] [string] $Service)
$ErrorActionPreference = 'Stop'
try {
    [Console]::OutputEncoding = [Text.Encoding]::UTF8
    $Found = Get-Service $Service
    if ($Found.Name -ne $Service) { throw 'no service has this name' }    # a pattern that matches none is no error
    Write-Output "$Service is being stopped; NotBefore: $env:IMDS_BRIDGE_NOT_BEFORE, seconds left: $env:IMDS_BRIDGE_SECONDS_LEFT"
    if ($Found.Status -ne 'StopPending') { Stop-Service $Service -NoWait }    # a drain that was ended may have asked for it: it may run twice
    $Seconds = [int] $env:IMDS_BRIDGE_SECONDS_LEFT - 2    # to say what it waits for before it is ended
    if ($Seconds -lt 1) { $Seconds = 600 }    # by hand, or NotBefore has passed: its own limit ends it
    $Found.WaitForStatus('Stopped', [TimeSpan]::FromSeconds($Seconds))
    Write-Output "$Service is stopped for the $env:IMDS_BRIDGE_EVENT_TYPE $env:IMDS_BRIDGE_EVENT_ID"
} catch {
    Write-Output "$Service cannot be stopped: $_"
    exit 1
}
exit 0
