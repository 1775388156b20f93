#!/bin/sh
# What tests/systemd/test_recipes.py does to a cluster of one node, whose resource is a service.
package() { echo pacemaker; }
set_up() {
    cat >/etc/systemd/system/app.service <<'EOF'
[Service]
ExecStart=sleep infinity
ExecStop=/bin/sh -c 'while [ -e /run/occupied ]; do sleep 0.1; done'
EOF
    cat >/etc/corosync/corosync.conf <<'EOF'
totem {
    version: 2
    cluster_name: shop
    transport: udpu
}
quorum {
    provider: corosync_votequorum
    expected_votes: 1
}
nodelist {
    node {
        ring0_addr: 10.9.8.1
        name: web-0
        nodeid: 1
    }
}
EOF
    rm -f /var/lib/pacemaker/cib/* # its signature would not fit
    cat >/var/lib/pacemaker/cib/cib.xml <<'EOF'
<cib admin_epoch="0" epoch="1" num_updates="0" validate-with="pacemaker-3.0"><configuration>
<crm_config><cluster_property_set id="set">
<nvpair id="deadtime" name="dc-deadtime" value="2s"/><nvpair id="stonith" name="stonith-enabled" value="false"/>
<nvpair id="health" name="node-health-strategy" value="migrate-on-red"/>
</cluster_property_set></crm_config><nodes/>
<resources><primitive id="app" class="systemd" type="app"><operations>
<op id="app-stop" name="stop" interval="0" timeout="300"/><op id="app-start" name="start" interval="0" timeout="60"/>
</operations></primitive></resources><constraints/></configuration><status/></cib>
EOF
    chown hacluster:haclient /var/lib/pacemaker/cib/cib.xml
    systemctl daemon-reload
    systemctl restart corosync pacemaker
}
prepare() { :; }
red() { crm_attribute -N web-0 -l forever -n '#health-imds-bridge' -G -q -d none; }
is_back() { systemctl is-active app && [ "$(red)" = none ]; }
is_drained() { [ "$(systemctl show -P ActiveState app)" = inactive ] && [ "$(red)" = red ]; }
occupy() { touch /run/occupied; }
release() { rm /run/occupied; }
hang() { systemctl kill --signal=STOP pacemaker; }
go_on() { systemctl kill --signal=CONT pacemaker; }
stop() { systemctl stop pacemaker; }
start() { systemctl start pacemaker; }
standby() { crm_attribute -N web-0 -l forever -n standby "$@"; }
meddle() { standby -v on; }
is_meddled() { [ "$(standby -G -q)" = on ] && [ "$(red)" = none ]; }
undo() { standby -D; }
