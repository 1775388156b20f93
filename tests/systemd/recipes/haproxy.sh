#!/bin/sh
# What tests/systemd/test_recipes.py does to HAProxy.
package() { echo haproxy; }
set_up() {
    cat >>/etc/haproxy/haproxy.cfg <<'EOF'
listen shop
    mode tcp
    timeout client 10m
    timeout server 10m
    bind 127.0.0.1:8081
    server web-0 127.0.0.1:8099
EOF
    systemd-run --quiet --unit shop-web python3 -m http.server --bind 127.0.0.1 8099
    systemctl restart haproxy
}
prepare() { :; }
ask() {
    python3 -c 'if True:
        import socket, sys
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect("/run/haproxy/admin.sock")
            connection.sendall(sys.argv[1].encode() + b"\n")
            print(connection.makefile().read())' "$1"
}
state() { ask "show servers state shop" | awk '$4 == "web-0" { print $7 }'; }
is_back() { [ "$(state)" = 0 ]; }
is_drained() { [ "$(state)" = 8 ]; }
occupy() {
    systemd-run --quiet --unit customer python3 -c 'if True:
        import socket, time
        connection = socket.create_connection(("127.0.0.1", 8081))
        time.sleep(600)'
    until ask "show stat" | grep -q '^shop,web-0,0,0,1,'; do sleep 0.1; done
}
release() { systemctl stop customer; }
hang() { systemctl kill --signal=STOP haproxy; }
go_on() { systemctl kill --signal=CONT haproxy; }
stop() { systemctl stop haproxy; }
start() { systemctl start haproxy; }
meddle() { ask "set server shop/web-0 state maint"; }
is_meddled() { [ "$(state)" = 1 ]; }
undo() { ask "set server shop/web-0 state ready"; }
