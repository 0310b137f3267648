#!/usr/bin/env bash
# A real Slurm of several nodes on this one machine, for tests and for trying out job scripts.
#
#   tools/local_slurm.sh install        install the missing Debian packages (needs root)
#   tools/local_slurm.sh up             start munge, the controller and the nodes; returns when all are idle
#   tools/local_slurm.sh env            print the line that points sbatch, squeue, … at it:  eval "$(… env)"
#   tools/local_slurm.sh status         nodes and jobs
#   tools/local_slurm.sh kill-node I    crash node I at once, with all that runs on it
#   tools/local_slurm.sh start-node I   boot node I again
#   tools/local_slurm.sh down           stop everything and delete the folder
#
# Every node is a process tree of its own (PID, mount and host name namespaces) with pretended GPUs: Slurm schedules
# them and sets CUDA_VISIBLE_DEVICES, but there is no device behind them. Nothing outside the folder is changed.
# Exit codes: 0 done, 1 failed, 2 wrong usage, 77 cannot run on this machine (the reason is on standard error).
#
# Settings, from the environment:
LAB=${LOCAL_SLURM_DIR:-/tmp/local_slurm}       # everything lives here; keep it short, sockets have a length limit
NODES=${LOCAL_SLURM_NODES:-4}                  # nodes are called node0, node1, …
GPUS=${LOCAL_SLURM_GPUS:-8}                    # pretended GPUs per node
CPUS=${LOCAL_SLURM_CPUS:-64}                   # CPU cores that each node claims to have
PORT=${LOCAL_SLURM_PORT:-16817}                # controller port; node I listens on PORT + 100 + I
FIRST_JOB=${LOCAL_SLURM_FIRST_JOB:-1}          # number of the first job
KILL_WAIT=${LOCAL_SLURM_KILL_WAIT:-3}          # seconds between SIGTERM and SIGKILL
NODE_TIMEOUT=${LOCAL_SLURM_NODE_TIMEOUT:-6}    # seconds without an answer until a node counts as down
NETNS=${LOCAL_SLURM_NETNS:-0}                  # 1: each node gets its own network, a crashed node goes silent
SUBNET=${LOCAL_SLURM_SUBNET:-10.253.77}        # the nodes' network when NETNS=1 (node I is SUBNET.(10+I))
BRIDGE=${LOCAL_SLURM_BRIDGE:-mgtl-slurm}       # name of the bridge between them
PREEMPT=${LOCAL_SLURM_PREEMPT:-0}              # 1: a second partition, urgent, whose jobs requeue those of batch

set -euo pipefail
LAB=$(realpath -m "$LAB")
export SLURM_CONF=$LAB/etc/slurm.conf
PROGRAMS=(slurmctld slurmd sbatch munged munge)
PACKAGES=(slurmctld slurmd slurm-client munge)

MARK=.made_by_local_slurm
is_ours() { [ -e "$LAB/$MARK" ]; }
not_ours() { echo "local_slurm: $LAB holds other files, which 'down' would delete: set LOCAL_SLURM_DIR" >&2; exit 1; }

cannot() { echo "local_slurm: $*" >&2; exit 77; }

missing_programs() {
  local program
  for program in "${PROGRAMS[@]}"; do command -v "$program" >/dev/null || echo "$program"; done
}

install_packages() {
  local missing
  missing=$(missing_programs | xargs)
  [ -n "$missing" ] || return 0
  command -v apt-get >/dev/null || cannot "$missing missing, and there is no apt-get: install Slurm and munge by hand"
  [ "$(id -u)" = 0 ] || cannot "$missing missing: run 'apt-get install ${PACKAGES[*]}' as root"
  echo "local_slurm: installing ${PACKAGES[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  local log; log=$(mktemp)
  # two at once would find each other's locks
  exec {apt}>"${TMPDIR:-/tmp}/local_slurm.apt"
  flock "$apt"
  { apt-get update && apt-get install -y --no-install-recommends "${PACKAGES[@]}"; } >"$log" 2>&1 ||
    { tail -n 5 "$log" >&2; cannot "apt-get could not install ${PACKAGES[*]}"; }
  rm -f "$log"
  exec {apt}>&-
}

# --- where each node listens ---

if [ "$NETNS" = 1 ]; then
  CONTROLLER=$SUBNET.1
  node_address() { echo "$SUBNET.$((10 + $1))"; }
else
  CONTROLLER=127.0.0.1
  node_address() { echo "127.0.1.$((10 + $1))"; }
fi
node_port() { echo $((PORT + 100 + $1)); }
all_nodes() { seq 0 $((NODES - 1)); }

# --- configuration files ---

write_configuration() {
  mkdir -p "$LAB"/{etc,log,run,state,spool,munge,dev}
  : >"$LAB/$MARK"
  chmod 755 "$LAB" "$LAB"/{etc,run}
  chmod 700 "$LAB/munge"
  local i
  {
    cat <<CONF
ClusterName=local
SlurmctldHost=$(hostname -s)($CONTROLLER)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits until its old credential has expired: two minutes unless this is short
AuthInfo=socket=$LAB/run/munge.sock,cred_expire=5
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/run/slurmctld.pid
SlurmdPidFile=$LAB/run/slurmd.%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
# no cgroups, no accounting: they need what a container seldom has
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
# schedule at once instead of every minute
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,bf_interval=1,batch_sched_delay=0,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# believe the sizes below, whatever this machine has
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=$NODE_TIMEOUT
MessageTimeout=10
TCPTimeout=1
KillWait=$KILL_WAIT
InactiveLimit=0
WaitTime=0
MinJobAge=3600
FirstJobId=$FIRST_JOB
JobRequeue=1
PropagateResourceLimits=NONE
NodeName=DEFAULT CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=1000000 State=UNKNOWN Gres=gpu:h100:$GPUS
CONF
    for i in $(all_nodes); do
      echo "NodeName=node$i NodeHostname=$(hostname -s) NodeAddr=$(node_address "$i") Port=$(node_port "$i")"
    done
    echo "PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1"
    if [ "$PREEMPT" = 1 ]; then
      echo "PreemptType=preempt/partition_prio"
      echo "PreemptMode=REQUEUE"
      echo "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=9"
    fi
  } >"$SLURM_CONF"

  if [ "$GPUS" -gt 0 ]; then # character devices; the number in the name becomes the CUDA index
    for i in $(seq 0 $((GPUS - 1))); do mknod "$LAB/dev/nvidia$i" c 1 3; done
    echo "NodeName=node[0-$((NODES - 1))] Name=gpu Type=h100 File=$LAB/dev/nvidia[0-$((GPUS - 1))]" >"$LAB/etc/gres.conf"
  fi
  # seen only inside the nodes' own mount namespaces
  {
    echo "127.0.0.1 localhost"
    echo "$CONTROLLER $(hostname -s)"
    for i in $(all_nodes); do echo "$(node_address "$i") node$i"; done
  } >"$LAB/etc/hosts"
}

# --- starting ---

wait_for() { # SECONDS COMMAND…: until the command succeeds
  local tries=$(($1 * 10)); shift
  while ! "$@"; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || return 1
    sleep 0.1
  done
}
munge_answers() { [ -S "$LAB/run/munge.sock" ] && munge -S "$LAB/run/munge.sock" -n >/dev/null 2>&1; }
nodes_idle() { [ "$(sinfo -h -t idle -o %D 2>/dev/null | head -n 1)" = "$NODES" ]; }

start_munge() {
  head -c 128 /dev/urandom >"$LAB/munge/key"
  chmod 600 "$LAB/munge/key"
  munged --foreground --force --key-file="$LAB/munge/key" --socket="$LAB/run/munge.sock" \
    --pid-file="$LAB/munge/munged.pid" --log-file="$LAB/munge/munged.log" --seed-file="$LAB/munge/seed" \
    --num-threads=2 </dev/null >>"$LAB/log/munged.out" 2>&1 &
  echo $! >"$LAB/run/munged.started"
  wait_for 60 munge_answers || { cat "$LAB/log/munged.out" >&2; cannot "munged did not start"; }
}

add_network() { # I: a network namespace on the bridge
  # not `ip netns exec`: it remounts /sys, where slurmd then finds no cgroup
  ip netns del "mgtl$1" 2>/dev/null || true
  ip link del "mgtlv$1" 2>/dev/null || true
  ip netns add "mgtl$1"
  ip link add "mgtlv$1" type veth peer name eth0 netns "mgtl$1"
  ip link set "mgtlv$1" master "$BRIDGE" up
  ip -n "mgtl$1" addr add "$(node_address "$1")/24" dev eth0
  ip -n "mgtl$1" link set eth0 up
  ip -n "mgtl$1" link set lo up
}

start_node() { # I
  local enter=()
  mkdir -p "$LAB/spool/node$1"
  if [ "$NETNS" = 1 ]; then
    add_network "$1"
    enter=(nsenter "--net=/run/netns/mgtl$1")
  fi
  # kill -9 of the recorded process ends its PID namespace: slurmd, job steps and ranks die in one moment
  "${enter[@]}" unshare --mount --uts --pid --fork --kill-child=KILL --mount-proc --propagation private bash -c "
    mount --bind '$LAB/etc/hosts' /etc/hosts && hostname node$1 || exit 1
    slurmd -D -N node$1 &
    trap 'kill %1' TERM
    wait; wait" local-slurm-node </dev/null >>"$LAB/log/slurmd.node$1.out" 2>&1 &
  echo $! >"$LAB/run/node$1.started"
  disown # or bash reports its end, when the node is killed
}

up() {
  [ ! -e "$LAB/run/munged.started" ] || { echo "local_slurm: $LAB is in use: run '$0 down' first" >&2; exit 1; }
  [ ! -e "$LAB" ] || is_ours || [ -z "$(ls -A "$LAB")" ] || not_ours
  [ "$(id -u)" = 0 ] || cannot "only root can make the nodes' namespaces"
  unshare --mount --uts --pid --fork --mount-proc true 2>/dev/null || cannot "this machine forbids namespaces (unshare)"
  local missing; missing=$(missing_programs | xargs)
  [ -z "$missing" ] || cannot "$missing missing: run '$0 install'"
  ! (: </dev/tcp/127.0.0.1/"$PORT") 2>/dev/null || {
    echo "local_slurm: port $PORT is in use: stop the other local Slurm, or set LOCAL_SLURM_PORT" >&2
    exit 1
  }
  trap 'down' ERR
  write_configuration 2>"$LAB.err" || { local why; why=$(cat "$LAB.err"); rm -rf "$LAB" "$LAB.err"; cannot "$why"; }
  rm -f "$LAB.err"
  if [ "$NETNS" = 1 ]; then
    ip link add "$BRIDGE" type bridge 2>/dev/null || true
    ip addr replace "$SUBNET.1/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
  fi
  start_munge
  slurmctld -D -c </dev/null >>"$LAB/log/slurmctld.out" 2>&1 &
  echo $! >"$LAB/run/slurmctld.started"
  local i
  for i in $(all_nodes); do start_node "$i"; done
  if ! wait_for 180 nodes_idle; then
    tail -n 3 "$LAB/log/slurmctld.log" "$LAB/log/slurmd.node0.log" >&2 || true
    down
    cannot "the nodes did not become idle"
  fi
  trap - ERR
}

# --- stopping: only processes that this script started ---

running() { # PID NAME: alive, not a zombie, and still the program we started
  [ -r "/proc/$1/stat" ] && ! grep -q ') Z ' "/proc/$1/stat" && tr '\0' ' ' <"/proc/$1/cmdline" | grep -q "$2"
}
stopped() { ! running "$@"; }
stop() { # FILE NAME [SIGNAL]
  [ -s "$1" ] || return 0
  local pid; pid=$(cat "$1")
  running "$pid" "$2" || return 0
  kill "-${3:-TERM}" "$pid" 2>/dev/null || true
  wait_for 5 stopped "$pid" "$2" || kill -KILL "$pid" 2>/dev/null || true
}
node_runs() { [ -s "$LAB/run/node$1.started" ] && running "$(cat "$LAB/run/node$1.started")" local-slurm-node; }
no_jobs() { [ -z "$(timeout 2 squeue -h 2>/dev/null)" ]; }

down() {
  [ -e "$LAB" ] || return 0
  is_ours || not_ours
  if [ -e "$SLURM_CONF" ]; then
    timeout 5 scancel --user="$(id -un)" 2>/dev/null || true
    wait_for $((KILL_WAIT + 3)) no_jobs || true
  fi
  local file i
  for file in "$LAB"/run/node*.started; do
    [ ! -s "$file" ] || ! running "$(cat "$file")" local-slurm-node || kill -KILL "$(cat "$file")" || true
  done
  for file in "$LAB"/run/node*.started; do stop "$file" local-slurm-node KILL; done
  stop "$LAB/run/slurmctld.started" slurmctld
  stop "$LAB/run/munged.started" munged
  if [ "$NETNS" = 1 ]; then
    for i in $(all_nodes); do
      ip netns del "mgtl$i" 2>/dev/null || true
      ip link del "mgtlv$i" 2>/dev/null || true
    done
    ip link del "$BRIDGE" 2>/dev/null || true
  fi
  rm -rf "$LAB"
}

usage() { sed -n '4,10s/^#   //p' "$0" >&2; exit 2; }
node_argument() { case "${1:-}" in '' | *[!0-9]*) usage ;; esac; [ "$1" -lt "$NODES" ] || usage; }

case "${1:-}" in
  install) install_packages ;;
  up) up ;;
  env) echo "export SLURM_CONF=$SLURM_CONF" ;;
  status) sinfo -N -l; squeue -l ;;
  kill-node)
    node_argument "${2:-}"
    node_runs "$2" || { echo "local_slurm: node$2 does not run" >&2; exit 1; }
    kill -KILL "$(cat "$LAB/run/node$2.started")" ;;
  start-node)
    node_argument "${2:-}"
    ! node_runs "$2" || { echo "local_slurm: node$2 runs already" >&2; exit 1; }
    start_node "$2" ;;
  down) down ;;
  *) usage ;;
esac
