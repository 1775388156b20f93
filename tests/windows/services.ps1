<#
.SYNOPSIS
Try the scripts of infra/windows in Windows PowerShell 5.1: installations and upgrades that fail and succeed, and a drain of a real service.
It installs and removes services, so it needs an administrator on a machine that can be lost, such as one of CI.
.EXAMPLE
tests\windows\services.ps1 -Wheel dist\imds_bridge-0.1.0-py3-none-any.whl
#>
#Requires -RunAsAdministrator
param([Parameter(Mandatory)] [string] $Wheel)
$ErrorActionPreference = 'Stop'
$Scripts = (Resolve-Path "$PSScriptRoot\..\..\infra\windows").Path
$Work = "$env:SystemDrive\imds bridge [test]"    # a space, and characters of a pattern
$Python = (Get-Command python.exe).Source
$PowerShell = "$env:SystemRoot\System32\WindowsPowerShell\v1.0\powershell.exe"
$Programs = "$env:ProgramFiles\imds-bridge"
$Logs = 'C:\ProgramData\imds-bridge\logs'

function Assert([bool] $Holds, [string] $What) {
    if (-not $Holds) { throw "does not hold: $What" }
    Write-Host "ok: $What"
}

function Wait-For([scriptblock] $Holds, [string] $What) {
    $Until = (Get-Date).AddSeconds(90)
    while (-not (& $Holds) -and (Get-Date) -lt $Until) { Start-Sleep -Milliseconds 500 }
    Assert ([bool] (& $Holds)) $What
}

function Get-Status([string] $Name) { [string] (Get-Service $Name -ErrorAction SilentlyContinue).Status }

# Runs a script in a process of its own, as listen does; returns its exit code.
function Invoke-Script([string] $Script, [string[]] $Arguments) {
    $Quoted = @('-NoProfile', '-NonInteractive', '-File', $Script) + $Arguments | ForEach-Object { "`"$_`"" }
    (Start-Process $PowerShell -Wait -PassThru -NoNewWindow -ArgumentList $Quoted).ExitCode
}

function Invoke-Install([hashtable] $Changed) {
    $Given = @{ Role = 'listen'; Wheel = $Wheel; WinSW = $WinSW; Config = $Config; Python = $Python; Manages = 'MyWorker' }
    foreach ($Name in $Changed.Keys) { $Given[$Name] = $Changed[$Name] }
    $Arguments = foreach ($Name in $Given.Keys) { if ($Given[$Name]) { "-$Name"; $Given[$Name] } }
    Invoke-Script "$Scripts\install.ps1" $Arguments
}

function Get-Listen { Get-CimInstance Win32_Service -Filter "Name='imds-bridge-listen'" }

Assert ($PSVersionTable.PSVersion.Major -eq 5) 'this is Windows PowerShell 5'
foreach ($File in Get-ChildItem "$Scripts\*.ps1") {
    $Faults = $null
    [void] [Management.Automation.Language.Parser]::ParseFile($File.FullName, [ref] $null, [ref] $Faults)
    Assert ($Faults.Count -eq 0) "$($File.Name) can be parsed"
}

# What is installed, and what is not.
[void] [IO.Directory]::CreateDirectory($Work)
[IO.File]::Copy((Resolve-Path $Wheel).Path, "$Work\$(Split-Path -Leaf $Wheel)", $true)
$Wheel = "$Work\$(Split-Path -Leaf $Wheel)"
$WinSW = "$Work\WinSW-x64.exe"
$Config = "$Work\listen.toml"
$Broken = "$Work\imds_bridge-9.0-py3-none-any.whl"
[Net.ServicePointManager]::SecurityProtocol = 'Tls12'
(New-Object Net.WebClient).DownloadFile('https://github.com/winsw/winsw/releases/download/v2.12.0/WinSW-x64.exe', $WinSW)
$Hash = (Get-FileHash -LiteralPath $WinSW).Hash
Assert ($Hash -eq '05B82D46AD331CC16BDC00DE5C6332C1EF818DF8CEEFCD49C726553209B3A0DA') 'WinSW is the one that is known'
[IO.File]::WriteAllText($Broken, 'no wheel')
$Run = "'$PowerShell', '-NoProfile', '-NonInteractive', '-File', '$Programs"
[IO.File]::WriteAllText($Config, @"
state_dir = 'C:\ProgramData\imds-bridge\state'
[imds]
endpoint = "http://127.0.0.1:8811"
[sinks.out]
kind = "stdout"
[[approvals.auto]]
event_type = ["Reboot"]
run = [$Run\drain.ps1', 'MyWorker']
recover = [$Run\recover.ps1', 'MyWorker']
"@)

# A service that takes 15 seconds to stop: it ignores Ctrl-C until WinSW ends it.
$Worker = "$env:SystemDrive\worker"
[void] [IO.Directory]::CreateDirectory($Worker)
Copy-Item -LiteralPath $WinSW "$Worker\MyWorker.exe"
[IO.File]::WriteAllText("$Worker\worker.py", "import signal, time`nsignal.signal(signal.SIGINT, signal.SIG_IGN)`ntime.sleep(100000)`n")
[IO.File]::WriteAllText("$Worker\MyWorker.xml", "<service><id>MyWorker</id><name>MyWorker</name><description>A worker</description>" +
    "<executable>$Python</executable><arguments>$Worker\worker.py</arguments><stoptimeout>15 sec</stoptimeout></service>")

$Lab = $null
Push-Location "$PSScriptRoot\..\.."    # where python -m bridge is found
try {
    & "$Worker\MyWorker.exe" install
    Start-Service MyWorker

    Assert ((Invoke-Install @{ Wheel = $Broken }) -ne 0) 'a first installation with a broken wheel fails'
    Assert ($null -eq (Get-Listen)) 'it leaves no service'
    Assert ((Invoke-Install @{ Account = 'NoSuchDomain\nobody' }) -ne 0) 'a first installation with an unknown account fails'
    Assert ((Get-Listen).State -eq 'Stopped' -and (Get-Listen).StartMode -eq 'Manual') 'what it leaves does not run and does not start'

    # In this process with everything redirected, as into a log: Python writes a line to stderr for each import.
    $env:PYTHONPROFILEIMPORTTIME = '1'
    & "$Scripts\install.ps1" -Role listen -Wheel $Wheel -WinSW $WinSW -Config $Config -Python $Python -Manages MyWorker *> "$Worker\install.log"
    $env:PYTHONPROFILEIMPORTTIME = $null
    Assert (@(Select-String -SimpleMatch 'import time:' "$Worker\install.log").Count -gt 0) 'an installation is not ended by lines on stderr'
    $Listen = Get-Listen
    Assert ($Listen.State -eq 'Running' -and $Listen.StartMode -eq 'Auto') 'the service runs and starts by itself'
    Assert ($Listen.StartName -eq 'NT SERVICE\imds-bridge-listen') 'it has its own account'

    foreach ($Changed in @{ Wheel = $Broken }, @{ Wheel = "$Broken.no" }, @{ WinSW = "$WinSW.no" }, @{ Config = "$Config.no" },
        @{ Manages = 'MyWork*' }, @{ Account = 'NoSuchDomain\nobody' }) {
        $What = @($Changed.Keys)[0] + ' ' + @($Changed.Values)[0]
        Assert ((Invoke-Install $Changed) -ne 0) "an upgrade with $What fails"
        Assert ((Get-Status imds-bridge-listen) -eq 'Running') 'the service runs all the same'
    }
    [IO.File]::WriteAllText("$Programs\venv\pyvenv.cfg", '')
    Assert ((Invoke-Install @{ Config = $null }) -eq 0) 'an upgrade repairs an environment and keeps the configuration'
    Assert ((Get-Listen).State -eq 'Running' -and (Get-Listen).StartName -eq $Listen.StartName) 'the service runs with the same account'

    Assert ((Invoke-Script "$Programs\drain.ps1" 'MyWorkr*') -eq 1) 'a drain of a pattern that matches nothing fails'
    Assert ((Invoke-Script "$Programs\recover.ps1" 'MyWorkr*') -eq 75) 'so does its recovery'
    $First = Start-Process $PowerShell -PassThru -NoNewWindow -ArgumentList "-NoProfile -NonInteractive -File `"$Programs\drain.ps1`" MyWorker"
    Wait-For { (Get-Status MyWorker) -eq 'StopPending' } 'a drain stops the service'
    Stop-Process -Id $First.Id -Force
    Assert ((Invoke-Script "$Programs\drain.ps1" 'MyWorker') -eq 0) 'a drain that is repeated while the service is stopping succeeds'
    Assert ((Get-Status MyWorker) -eq 'Stopped') 'and the service is stopped'
    Assert ((Invoke-Script "$Programs\recover.ps1" 'MyWorker') -eq 0) 'it is recovered'
    $First = Start-Process $PowerShell -PassThru -NoNewWindow -ArgumentList "-NoProfile -NonInteractive -File `"$Programs\drain.ps1`" MyWorker"
    Wait-For { (Get-Status MyWorker) -eq 'StopPending' } 'it is drained again'
    Stop-Process -Id $First.Id -Force
    Assert ((Invoke-Script "$Programs\recover.ps1" 'MyWorker') -eq 0) 'a recovery waits for a service that is stopping'
    Assert ((Get-Status MyWorker) -eq 'Running') 'and the service runs'

    # By the listener, whose account may stop and start this service only.
    $Lab = Start-Process $Python -PassThru -NoNewWindow -ArgumentList '-m bridge lab --vm web-0' -RedirectStandardOutput "$Worker\lab.log"
    Wait-For { (Test-NetConnection 127.0.0.1 -Port 8810 -WarningAction SilentlyContinue).TcpTestSucceeded } 'the lab runs'
    & $Python -m bridge lab schedule --type Reboot --vm web-0 --impact 20
    Wait-For { (Get-Status MyWorker) -eq 'Stopped' } 'an event drains the service'
    Wait-For { @((& $Python -m bridge lab state | Out-String | ConvertFrom-Json).approvals).Count } 'and is approved'
    Wait-For { (Get-Status MyWorker) -eq 'Running' } 'after the event the service runs again'
} catch {
    Get-ChildItem "$Worker\*.log", "$Logs\*.log" | ForEach-Object { Write-Host "--- $_"; Get-Content -Tail 40 $_ }
    throw
} finally {
    Pop-Location
    if ($Lab) { Stop-Process -Id $Lab.Id -Force -ErrorAction Continue }
    foreach ($Service in "$Programs\imds-bridge-listen.exe", "$Worker\MyWorker.exe") {
        if (Test-Path $Service) { & $Service stopwait; & $Service uninstall }
    }
}
