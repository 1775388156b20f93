<#
.SYNOPSIS
Install or upgrade imds-bridge, and run one role as a Windows service with its own account.
.EXAMPLE
.\install.ps1 -Wheel .\imds_bridge-0.1.0-py3-none-any.whl -WinSW .\WinSW-x64.exe -Config .\forward.toml
.EXAMPLE
.\install.ps1 -Role listen -Wheel .\imds_bridge-0.1.0-py3-none-any.whl -WinSW .\WinSW-x64.exe -Config .\listen.toml -Manages MyWorker
Its programs may stop and start the service MyWorker, as drain.ps1 and recover.ps1 do.
#>
#Requires -RunAsAdministrator
param(
    [Parameter(Mandatory)] [string] $Wheel,
    [Parameter(Mandatory)] [string] $WinSW,
    [ValidateSet('forward', 'listen', 'relay')] [string] $Role = 'forward',
    [string] $Config,
    [string] $Python = 'C:\Program Files\Python312\python.exe',
    [string] $Account,
    [string[]] $Manages = @()
)
$ErrorActionPreference = 'Stop'
$Service = "imds-bridge-$Role"
$Program = Join-Path $env:ProgramW6432 'imds-bridge'    # of 64 bits also where PowerShell is not
$Data = 'C:\ProgramData\imds-bridge'
if (-not $Account) { $Account = (Get-CimInstance Win32_Service -Filter "Name='$Service'").StartName }
if ($Account -in $null, '', 'LocalSystem') { $Account = "NT SERVICE\$Service" }    # new, or left half installed

function Invoke-Checked([string] $Command) {
    $Found = Get-Command $Command -CommandType Application
    $ErrorActionPreference = 'Continue'    # Windows PowerShell 5.1 takes a line on a redirected stderr for an error
    & $Found @args
    if ($LASTEXITCODE -ne 0) { throw "$Command $args ended with $LASTEXITCODE" }
}

# Before anything is changed or stopped: files that are not there, and services, whose names may not be patterns.
$Wheel, $WinSW = foreach ($File in $Wheel, $WinSW) { (Get-Item -LiteralPath $File).FullName }
if ($Config) { $Config = (Get-Item -LiteralPath $Config).FullName }
foreach ($Name in $Manages) { if ((Get-Service $Name).Name -ne $Name) { throw "No service is named $Name" } }
if (-not ($Config -or (Test-Path "$Data\$Role.toml"))) { throw "-Config is needed: there is no $Data\$Role.toml yet" }

# Any user can create folders in ProgramData: an existing one must belong to an administrator.
if (Test-Path $Data) {
    $Owner = (Get-Acl $Data).GetOwner([Security.Principal.SecurityIdentifier]).Value
    if ($Owner -notin 'S-1-5-18', 'S-1-5-32-544') { throw "$Data belongs to ${Owner}: check its content and remove it" }
}
foreach ($Folder in $Program, $Data, "$Data\state\$Role", "$Data\logs") {
    New-Item -ItemType Directory -Force $Folder | Out-Null
}
Invoke-Checked icacls $Data /setowner '*S-1-5-32-544' /Q
Invoke-Checked icacls $Data /inheritance:r /grant:r '*S-1-5-18:(OI)(CI)F' '*S-1-5-32-544:(OI)(CI)F' /Q

$Known = Get-Service $Service -ErrorAction SilentlyContinue
$IsInUse = $Known -and $Known.Status -eq 'Running'
trap { if ($IsInUse) { Start-Service $Service -ErrorAction Continue }; break }    # a failed upgrade leaves the VM with its service
if ($Known) { Stop-Service $Service }
$VenvPython = "$Program\venv\Scripts\python.exe"
try { Invoke-Checked $VenvPython -m pip --version } catch { Invoke-Checked $Python -m venv --clear "$Program\venv" }    # none, half of one, or its Python is gone
Invoke-Checked $VenvPython -m pip install --upgrade $Wheel
if ($Config -and $Config -ne "$Data\$Role.toml") { Copy-Item -LiteralPath $Config "$Data\$Role.toml" }

foreach ($Example in 'drain.ps1', 'recover.ps1') {    # one that is there may have been changed
    if (-not (Test-Path "$Program\$Example")) { Copy-Item -LiteralPath "$PSScriptRoot\$Example" $Program }
    $Hashes = (Get-FileHash -LiteralPath "$PSScriptRoot\$Example", "$Program\$Example").Hash | Select-Object -Unique
    if (@($Hashes).Count -gt 1) { Write-Warning "$Program\$Example is kept, and differs from the one of this version" }
    Unblock-File "$Program\$Example"    # from a downloaded archive it would not be run
}
Copy-Item -LiteralPath $WinSW "$Program\$Service.exe"
$Xml = (Get-Content -Raw -LiteralPath "$PSScriptRoot\imds-bridge.xml").Replace('@ROLE@', $Role).Replace('@PYTHON@', $VenvPython)
[IO.File]::WriteAllText("$Program\$Service.xml", $Xml)
if (-not $Known) { Invoke-Checked "$Program\$Service.exe" install }

# The account exists when the service does. It may read the configuration and write its own state and the logs.
Invoke-Checked sc.exe config $Service obj= $Account start= auto    # until here it is LocalSystem's, and does not start
Invoke-Checked sc.exe sidtype $Service unrestricted
Invoke-Checked icacls $Data /grant "${Account}:(OI)(CI)RX" /Q
Invoke-Checked icacls "$Data\state\$Role" /grant "${Account}:(OI)(CI)M" /Q
Invoke-Checked icacls "$Data\logs" /grant "${Account}:(OI)(CI)M" /Q

# What its programs drain: the account may query, stop and start these services, and change nothing else of them.
$Sid = (New-Object Security.Principal.NTAccount $Account).Translate([Security.Principal.SecurityIdentifier]).Value
$Entry = "(A;;CCLCSWRPWPLORC;;;$Sid)"
foreach ($Name in $Manages) {
    $List = (Invoke-Checked sc.exe sdshow $Name | Out-String).Trim()
    $New = $List -replace '^D:[A-Z]*(?=\()', "`$&$Entry"
    if ($New -eq $List) { throw "The access list of $Name has another form: $List" }
    if (-not $List.Contains($Entry)) { Invoke-Checked sc.exe sdset $Name $New }
}

Start-Service $Service
Get-Service $Service
