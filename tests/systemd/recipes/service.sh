#!/bin/sh
# What tests/systemd/test_recipes.py does to a service, and to what the recipe asks.
package() { echo systemd; }
set_up() {
    cat >/etc/systemd/system/shop.service <<'EOF'
[Service]
ExecStart=sleep infinity
ExecStop=/bin/sh -c 'while [ -e /run/occupied ]; do sleep 0.1; done'
EOF
    systemctl daemon-reload
    systemctl start shop
}
prepare() { :; }
state() { systemctl show -P ActiveState shop; }
is_back() { [ "$(state)" = active ]; }
is_drained() { [ "$(state)" = inactive ]; }
occupy() { touch /run/occupied; }
release() { rm /run/occupied; }
hang() { systemctl kill --signal=STOP dbus; }
go_on() { systemctl kill --signal=CONT dbus; }
stop() { systemctl stop dbus.socket dbus; }
start() { systemctl start dbus.socket dbus; }
meddle() { systemctl stop shop; }
is_meddled() { is_drained; }
undo() { systemctl start shop; }
