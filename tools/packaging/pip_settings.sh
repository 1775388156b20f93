#!/usr/bin/env bash
# Write the index of a Python's pip to pip.conf and its certificate authorities to pip.crt: pip_settings.sh PYTHON FOLDER
set -euo pipefail
{
    echo "[global]"
    "$1" -m pip config list | # the environment comes last
        sed -nE "s/^.*\.((extra-)?index-url|trusted-host|proxy|(default-)?timeout)='(.*)'\$/\1 = \4/p" |
        tac | sort --stable --unique --key=1,1
} >"$2/pip.conf"
authorities=$("$1" -m pip config list | sed -nE "s/^.*\.cert='(.*)'\$/\1/p" | tail -n 1)
authorities=${authorities:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}
if [ -f "$authorities" ]; then cp "$authorities" "$2/pip.crt"; fi
