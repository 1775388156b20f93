<#
.SYNOPSIS
Put this VM back to work after an event: start a service. Exit code 0: back to work; after any other one imds-bridge runs it again, and reports that.
.EXAMPLE
recover = ['C:\Windows\System32\WindowsPowerShell\v1.0\powershell.exe', '-NoProfile', '-NonInteractive', '-File', 'C:\Program Files\imds-bridge\recover.ps1', 'MyWorker']
#>
param([Parameter(Mandatory)] [string] $Service)
$ErrorActionPreference = 'Stop'
try {
    [Console]::OutputEncoding = [Text.Encoding]::UTF8
    $Found = Get-Service $Service
    if ($Found.Name -ne $Service) { throw 'no service has this name' }    # a pattern that matches none is no error
    if ($Found.Status -eq 'StopPending') { $Found.WaitForStatus('Stopped', '00:00:30') }    # by a drain that was ended: it cannot be started before
    Start-Service $Service    # already started is fine: it may run twice
    Write-Output "$Service is started after the $env:IMDS_BRIDGE_EVENT_TYPE $env:IMDS_BRIDGE_EVENT_ID"
} catch {
    Write-Output "$Service cannot be started: $_"
    exit 75    # also an exec sink repeats it then
}
exit 0
