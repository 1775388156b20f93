#!/bin/sh
# What tests/systemd/test_recipes.py does to a node of Slurm, whose controller is here, too.
package() { echo slurmd; }
set_up() {
    cat >/etc/slurm/slurm.conf <<'EOF'
ClusterName=shop
SlurmctldHost=web-0
SlurmUser=slurm
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmdTimeout=10
NodeName=web-0 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
EOF
    echo CgroupPlugin=cgroup/v1 >/etc/slurm/cgroup.conf
    mkdir -p /var/lib/slurm/slurmctld /var/lib/slurm/slurmd
    chown slurm:slurm /var/lib/slurm/slurmctld
    systemctl restart munge slurmctld slurmd
}
prepare() { :; }
state() { sinfo -h -n web-0 -o "%T %E"; }
is_back() { [ "$(state)" = "idle none" ]; }
is_drained() { state | grep -q '^drained imds-bridge '; }
occupy() {
    sbatch -o /dev/null --wrap 'sleep 600'
    until [ "$(squeue -h -o %T)" = RUNNING ]; do sleep 0.1; done
}
release() { scancel --user=root; }
hang() { systemctl kill --signal=STOP slurmctld; }
go_on() { systemctl kill --signal=CONT slurmctld; }
stop() { systemctl stop slurmctld; }
start() { systemctl start slurmctld; }
meddle() { scontrol update nodename=web-0 state=down reason=disk; }
is_meddled() { [ "$(state)" = "down disk" ]; }
undo() { scontrol update nodename=web-0 state=resume; }
