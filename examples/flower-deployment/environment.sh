# What all scripts here share; sourced, not run. Set KEYS, HOST, PORT and FLWR_HOME before if these do not suit.
KEYS=${KEYS:-$PWD/keys}             # from make_keys.py
HOST=${HOST:-127.0.0.1}             # where the SuperLink is reached
PORT=${PORT:-8000}
STATE=${STATE:-$PWD/state}          # what nodes remember over a restart
export FLWR_HOME=${FLWR_HOME:-$PWD/flwr}
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1   # or Flower runs uv at the start of every run
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
