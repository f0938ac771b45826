#!/bin/sh
# Certificates and passwords of deploy/compose.yaml: made once, renewed when a month of 90 days is left, and given
# to each role as its own.
#
#   prepare.sh FOLDER…   FOLDERs are given to the owner too
#
# SECRETS: a folder with one folder for `authority` and for each role. USERS: the users of Redis without passwords.
# OWNER: who reads the files of the roles. The authority's folder is shown to no other service.
set -eu
all=$SECRETS/authority
parties="--run cartpole --host broker --host redis --host server"
if ! test -s "$all/users.acl"; then
  penstock certificates "$all" $parties --redis-users "$USERS"
elif test -n "$(find "$all/broker.pem" -mtime +60)"; then
  # Without --redis-users passwords stay as they are: Redis reads them only when it starts.
  penstock certificates "$all" $parties
fi

give() {
  role=$1
  shift
  for file in "$@"; do
    cp "$all/$file" "$SECRETS/$role/.$file"
    chmod 0400 "$SECRETS/$role/.$file"
    chown "$OWNER" "$SECRETS/$role/.$file"
    mv "$SECRETS/$role/.$file" "$SECRETS/$role/$file"
  done
  chown "$OWNER" "$SECRETS/$role"
}

give redis redis.pem redis.key authority.pem users.acl
give broker broker.pem broker.key authority.pem redis-broker.password
give learner learner.pem learner.key authority.pem redis-learner.password
give actor actor.pem actor.key authority.pem
give server server.pem server.key authority.pem
for folder in "$@"; do chown -R "$OWNER" "$folder"; done
