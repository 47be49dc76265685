#!/usr/bin/env bash
# A whole fleet on this machine: SuperLink and five SuperNodes of five sizes. Ctrl-C ends all. Logs in ./log.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/environment.sh"
export KEYS STATE HOST PORT
if (exec 3<> "/dev/tcp/$HOST/$PORT") 2> /dev/null; then
  echo "fleet.sh: port $PORT is taken: is a fleet running already? another one needs another folder and another PORT" >&2
  exit 1
fi
processes=()
family() {                                      # processes and all that descend from them
  for pid in "$@"; do echo "$pid"; family $(pgrep -P "$pid"); done
}
finish() {
  trap - EXIT INT TERM
  all=$(family "${processes[@]}")
  kill -TERM $all 2> /dev/null || true
  for _ in 1 2 3 4 5; do [ -z "$(jobs -rp)" ] || sleep 1; done
  kill -KILL $all 2> /dev/null || true          # a SuperLink that somebody watches would stay for a minute
  wait 2> /dev/null
  echo "the fleet has ended"
}
trap finish EXIT
trap 'exit 130' INT TERM
await() {                                       # until a log says something, or its process has ended
  until grep -qs "$2" "log/$1.log"; do
    kill -0 "$3" 2> /dev/null || { tail -n 5 "log/$1.log" >&2; echo "fleet.sh: $1 has ended, see log/$1.log" >&2; exit 1; }
    sleep 1
  done
}

mkdir -p log
rm -f log/*.log
python "$here/make_keys.py" "$KEYS" --host "$HOST" --nodes 5
"$here/superlink.sh" > log/superlink.log 2>&1 &
processes+=($!)
await superlink 'Uvicorn running' $!
"$here/register.sh" "$KEYS"/node-[0-4].pub
for node in 0 1 2 3 4; do
  NODE_PORT=$((PORT + 1094 + node)) "$here/supernode.sh" "node-$node" "partition-id=$node level=$node" > "log/node-$node.log" 2>&1 &
  processes+=($!)
done
for node in 0 1 2 3 4; do await "node-$node" 'SuperNode ID' "${processes[$((node + 1))]}"; done
echo "the fleet is up; in another terminal: export FLWR_HOME=$FLWR_HOME; flwr run APP fleet --stream"
wait
