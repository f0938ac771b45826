#!/bin/bash
# An authority, certificates and kubeconfigs of a cluster, into the folder `keys`.
# usage: certificates.sh FOLDER PORT   PORT: on this machine's 127.0.0.1, where the API server is reached
set -eu
cd "$1"
address=10.77.0.1

quiet() { openssl "$@" 2> /dev/null; }

sign() { # NAME SUBJECT [NAMES]
    quiet req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "$2" -keyout "$1.key" -out "$1.csr"
    quiet x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out "$1.crt" -extfile <(
        echo "keyUsage=critical,digitalSignature,keyEncipherment"
        echo "extendedKeyUsage=serverAuth,clientAuth"
        echo "${3:+subjectAltName=$3}"
    )
}

configure() { # NAME USER FILE [SERVER]
    local server=${3:-https://$address:6443}
    cat > "$2" <<END
apiVersion: v1
kind: Config
clusters: [{name: cluster, cluster: {server: "$server", certificate-authority-data: $(base64 -w0 ca.crt)}}]
users: [{name: user, user: {client-certificate-data: $(base64 -w0 "$1.crt"), client-key-data: $(base64 -w0 "$1.key")}}]
contexts: [{name: context, context: {cluster: cluster, user: user}}]
current-context: context
END
}

quiet req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=ca -keyout ca.key -out ca.crt \
    -addext keyUsage=critical,digitalSignature,keyCertSign
names=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost
sign apiserver /CN=kube-apiserver $names,IP:$address,IP:127.0.0.1,IP:10.96.0.1
sign kubelet-server /CN=node DNS:node,IP:$address
sign apiserver-kubelet /O=system:masters/CN=apiserver-kubelet
sign admin /O=system:masters/CN=admin
configure admin admin.conf
configure admin outside.conf "https://127.0.0.1:$2"
for part in controller-manager scheduler proxy; do
    sign $part /CN=system:kube-$part
    configure $part $part.conf
done
sign node /O=system:nodes/CN=system:node:node
configure node node.conf
quiet genrsa -out accounts.key 2048
quiet rsa -in accounts.key -pubout -out accounts.pub
