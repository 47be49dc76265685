#!/usr/bin/env bash
# A whole fleet on this machine: SuperLink and five SuperNodes of five sizes. Ctrl-C ends all. Logs in ./log.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/environment.sh"
export KEYS STATE HOST PORT
trap 'kill $(jobs -p) 2> /dev/null' EXIT
mkdir -p log
rm -f log/superlink.log
python "$here/make_keys.py" "$KEYS" --host "$HOST" --nodes 5
"$here/superlink.sh" > log/superlink.log 2>&1 &
until grep -qs 'Uvicorn running' log/superlink.log; do
  kill -0 $! 2> /dev/null || { cat log/superlink.log; exit 1; }
  sleep 1
done
"$here/register.sh" "$KEYS"/node-*.pub
for node in 0 1 2 3 4; do
  NODE_PORT=$((9094 + node)) "$here/supernode.sh" "node-$node" "partition-id=$node level=$node" > "log/node-$node.log" 2>&1 &
done
echo "the fleet is up; in another terminal: export FLWR_HOME=$FLWR_HOME; flwr run APP fleet --stream"
wait
