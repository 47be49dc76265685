#!/usr/bin/env bash
# A whole fleet on this machine: SuperLink and five SuperNodes of five sizes. Ctrl-C ends all. Logs in ./log.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/environment.sh"
export KEYS STATE HOST PORT
if (exec 3<> "/dev/tcp/$HOST/$PORT") 2> /dev/null; then
  echo "fleet.sh: port $PORT is taken: is a fleet running already? PORT=8001 $0 takes another" >&2
  exit 1
fi
set -m                                          # each of them with all that it starts is a process group of its own
groups=()
finish() {
  trap - EXIT INT TERM
  for sign in TERM KILL; do                     # a SuperLink that somebody still watches would stay for a minute
    for group in "${groups[@]}"; do kill -$sign -- "-$group" 2> /dev/null || true; done
    for _ in 1 2 3 4 5; do [ -z "$(jobs -rp)" ] || sleep 1; done
  done
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
groups+=($!)
await superlink 'Uvicorn running' $!
"$here/register.sh" "$KEYS"/node-[0-4].pub
for node in 0 1 2 3 4; do
  NODE_PORT=$((9094 + node)) "$here/supernode.sh" "node-$node" "partition-id=$node level=$node" > "log/node-$node.log" 2>&1 &
  groups+=($!)
done
for node in 0 1 2 3 4; do await "node-$node" 'SuperNode ID' "${groups[$((node + 1))]}"; done
echo "the fleet is up; in another terminal: export FLWR_HOME=$FLWR_HOME; flwr run APP fleet --stream"
wait
