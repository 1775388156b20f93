#!/bin/sh
# What tests/systemd/test_recipes.py does to a PostgreSQL with one replica.
package() { echo patroni; }
member() { # member NAME PORT: print its configuration
    cat <<EOF
scope: shop
name: $1
etcd3: {host: '127.0.0.1:2379'}
restapi:
    listen: 127.0.0.1:$2
    connect_address: 127.0.0.1:$2
    authentication: {username: imds-bridge, password: letmein}
bootstrap:
    dcs: {ttl: 20, loop_wait: 2, retry_timeout: 4}
    initdb: [{encoding: UTF8}]
postgresql:
    listen: 127.0.0.1:1$2
    connect_address: 127.0.0.1:1$2
    data_dir: /var/lib/postgresql/$1
    bin_dir: $(echo /usr/lib/postgresql/*/bin)
    authentication:
        superuser: {username: postgres, password: secret}
        replication: {username: replicator, password: secret}
    pg_hba: [local all all trust, host all all 127.0.0.1/32 md5, host replication all 127.0.0.1/32 md5]
    parameters: {fsync: 'off', unix_socket_directories: /tmp}
EOF
}
set_up() {
    mkdir -p /etc/patroni/shop /etc/systemd/system/patroni.service.d
    member web-0 8008 >/etc/patroni/shop/00-member.yml
    member web-1 8009 >/etc/patroni/web-1.yml
    printf '[Unit]\nConditionPathExists=\n[Service]\nExecStart=\nExecStart=/usr/bin/patroni /etc/patroni/shop\n' \
        >/etc/systemd/system/patroni.service.d/folder.conf
    cp /usr/local/lib/imds-bridge/patroni/patroni-nofailover@.service /etc/systemd/system
    (umask 077; echo imds-bridge:letmein >/etc/imds-bridge/secrets/patroni)
    systemctl daemon-reload
    systemctl start etcd patroni
    until curl -sf 127.0.0.1:8008/primary; do sleep 0.2; done
    systemctl start patroni@web-1
    until cluster web-1 | grep -q '"role": "replica", "state": "\(running\|streaming\)"'; do sleep 0.2; done
}
cluster() { # cluster NAME: print the row of this member
    curl -s 127.0.0.1:8009/cluster | python3 -c 'if True:
        import json, sys
        print(*(json.dumps(one) for one in json.load(sys.stdin)["members"] if one["name"] == sys.argv[1]))' "$1"
}
prepare() { # the primary is here
    until cluster web-0 | grep -q '"role": "leader", "state": "running"'; do
        curl -s -u imds-bridge:letmein -d '{"leader": "web-1", "candidate": "web-0"}' 127.0.0.1:8009/switchover
        sleep 1
    done
    until cluster web-1 | grep -q '"role": "replica", "state": "\(running\|streaming\)"'; do sleep 0.2; done
}
is_back() { # at the latest after a loop_wait
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        row=$(cluster web-0)
        ! echo "$row" | grep -E '"state": "(running|streaming)"' | grep -vq nofailover || return 0
        sleep 1
    done
    echo "$row"
    return 1
}
is_drained() { row=$(cluster web-0); echo "$row" | grep '"nofailover": true' && ! echo "$row" | grep leader; }
occupy() { hang; }
release() { go_on; }
hang() { systemctl kill --kill-whom=main --signal=STOP patroni; }
go_on() { systemctl kill --kill-whom=main --signal=CONT patroni; }
stop() { systemctl stop patroni; }
start() { systemctl start patroni; }
meddle() {
    echo 'tags: {nofailover: true}' >/etc/patroni/shop/50-admin.yml
    systemctl reload patroni
    until cluster web-0 | grep -q nofailover; do sleep 0.2; done
}
is_meddled() { cluster web-0 | grep nofailover && [ ! -e /etc/patroni/shop/90-imds-bridge.yml ]; }
undo() {
    rm /etc/patroni/shop/50-admin.yml
    systemctl reload patroni
}
