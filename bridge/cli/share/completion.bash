# Completion of imds-bridge for bash
_imds_bridge() {
    local current=${COMP_WORDS[COMP_CWORD]} command="" words="" word
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$command $word" in
            " forward"|" listen"|" relay"|" console"|" approve"|" check"|" render"|" status"|" outbox"|" outbox list"|" outbox show"|" outbox retry"|" outbox drop"|" outbox move"|" config"|" config schema"|" config check"|" schema"|" completion"|" lab"|" lab schedule"|" lab start"|" lab cancel"|" lab complete"|" lab release"|" lab fault"|" lab state"|" lab scenarios"|" demo") command="$command $word" ;;
        esac
    done
    case "$command ${COMP_WORDS[COMP_CWORD-1]}" in
        " status --role"|" outbox list --role"|" outbox show --role"|" outbox retry --role"|" outbox drop --role"|" outbox move --role") words="forward listen relay console" ;;
        " lab schedule --source") words="Platform User" ;;
        " lab schedule --status") words="Scheduled Started" ;;
        " --config"|" forward --config"|" listen --config"|" relay --config"|" console --config"|" approve --config"|" approve --vm"|" approve --resource-group"|" approve --reason"|" approve --expires"|" check --config"|" render --config"|" render --sink"|" render --type"|" status --config"|" status --backlog-seconds"|" outbox --config"|" outbox list --config"|" outbox list --limit"|" outbox list --sink"|" outbox show --config"|" outbox retry --config"|" outbox retry --sink"|" outbox drop --config"|" outbox drop --sink"|" outbox move --config"|" outbox move --from"|" outbox move --to"|" schema --write"|" lab --vm"|" lab --scenario"|" lab --time-scale"|" lab --port-base"|" lab --bus-config"|" lab schedule --control"|" lab schedule --type"|" lab schedule --vm"|" lab schedule --other-vm"|" lab schedule --notice"|" lab schedule --duration"|" lab schedule --impact"|" lab schedule --description"|" lab start --control"|" lab cancel --control"|" lab complete --control"|" lab release --control"|" lab fault --control"|" lab fault --count"|" lab fault --seconds"|" lab fault --retry-after"|" lab state --control"|" demo --console"|" demo --minutes") return ;;
        *) case $command in
            "") words="forward listen relay console approve check render status outbox config schema completion lab demo --help --version --config" ;;
            " forward") words="--help --config --once" ;;
            " listen") words="--help --config --dry-run" ;;
            " relay") words="--help --config" ;;
            " console") words="--help --config" ;;
            " approve") words="--help --config --vm --resource-group --reason --expires --wait" ;;
            " check") words="--help --config --json --send" ;;
            " render") words="--help --config --sink --type --indent" ;;
            " status") words="--help --config --role --json --watch --check --backlog-seconds" ;;
            " outbox") words="list show retry drop move --help --config" ;;
            " outbox list") words="--help --config --role --json --dead --waiting --limit --sink" ;;
            " outbox show") words="--help --config --role --json" ;;
            " outbox retry") words="--help --config --role --all --sink" ;;
            " outbox drop") words="--help --config --role --all --sink --waiting --yes" ;;
            " outbox move") words="--help --config --role --from --to" ;;
            " config") words="schema check --help" ;;
            " config schema") words="--help" ;;
            " config check") words="--help" ;;
            " schema") words="--help --write" ;;
            " completion") words="bash zsh --help" ;;
            " lab") words="schedule start cancel complete release fault state scenarios --help --vm --scenario --time-scale --port-base --bus-config" ;;
            " lab schedule") words="--help --control --type --vm --other-vm --no-vm --notice --source --status --duration --impact --hold --description" ;;
            " lab start") words="--help --control" ;;
            " lab cancel") words="--help --control" ;;
            " lab complete") words="--help --control" ;;
            " lab release") words="--help --control" ;;
            " lab fault") words="--help --control --count --seconds --retry-after" ;;
            " lab state") words="--help --control" ;;
            " lab scenarios") words="--help" ;;
            " demo") words="--help --no-bus --fast --console --minutes" ;;
        esac ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}
complete -o default -F _imds_bridge imds-bridge
