#!/bin/bash
# Process 1 of the cluster: etcd, the control plane and one node, with what certificates.sh has written.
set -u
cd /node
address=10.77.0.1
ip link set lo up
# Some kernels have no dummy links: one end of a pair is as good.
ip link add eth0 type veth peer name eth0-peer
ip link set eth0-peer up
ip address add $address/24 dev eth0
ip link set eth0 up
ip route add default via 10.77.0.254 dev eth0 onlink
echo 1 > /proc/sys/net/ipv4/ip_forward
hostname node

etcd --data-dir /var/lib/etcd --unsafe-no-fsync \
    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380 > log/etcd.log 2>&1 &
/out/kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --advertise-address=$address \
    --secure-port=6443 --tls-cert-file=keys/apiserver.crt --tls-private-key-file=keys/apiserver.key \
    --client-ca-file=keys/ca.crt --kubelet-client-certificate=keys/apiserver-kubelet.crt \
    --kubelet-client-key=keys/apiserver-kubelet.key --kubelet-certificate-authority=keys/ca.crt \
    --kubelet-preferred-address-types=InternalIP \
    --service-account-key-file=keys/accounts.pub --service-account-signing-key-file=keys/accounts.key \
    --service-account-issuer=https://kubernetes.default.svc --service-cluster-ip-range=10.96.0.0/16 \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
    --profiling=false > log/apiserver.log 2>&1 &
export KUBECONFIG=/node/keys/admin.conf
until kubectl get --raw /readyz > /dev/null 2>&1; do sleep 0.5; done
/out/kube-controller-manager --kubeconfig=keys/controller-manager.conf \
    --authentication-kubeconfig=keys/controller-manager.conf \
    --authorization-kubeconfig=keys/controller-manager.conf \
    --service-account-private-key-file=keys/accounts.key --root-ca-file=keys/ca.crt \
    --use-service-account-credentials --leader-elect=false > log/controller-manager.log 2>&1 &
/out/kube-scheduler --kubeconfig=keys/scheduler.conf --authentication-kubeconfig=keys/scheduler.conf \
    --authorization-kubeconfig=keys/scheduler.conf --leader-elect=false > log/scheduler.log 2>&1 &

containerd -c containerd.toml > log/containerd.log 2>&1 &
until ctr version > /dev/null 2>&1; do sleep 0.2; done
ctr -n k8s.io images import --local images.tar > log/images.log 2>&1
/out/kubelet --config=kubelet.yaml --kubeconfig=keys/node.conf --hostname-override=node --node-ip=$address \
    > log/kubelet.log 2>&1 &
/out/kube-proxy --config=proxy.yaml > log/proxy.log 2>&1 &
wait
