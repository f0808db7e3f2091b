#!/bin/bash
# Podium on the nodes of a Slurm job: Ray's head and the driver on the first, Ray's workers on the others.
#   sbatch --nodes=2 --gpus-per-node=8 examples/ray/slurm.sh run.toml [--key=value …]
# Needs podium-rl[ray] in the same environment on every node, and the working folder on a disk that all of them see.
#SBATCH --job-name=podium
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120

set -euo pipefail
settings=$1
shift

# Whoever has the token can run code on every node: a file of this job, for this user alone.
umask 077
token=$PWD/.ray-token-$SLURM_JOB_ID
trap 'rm -f "$token"' EXIT
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token RAY_USAGE_STATS_ENABLED=0

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):6379

srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    ray start --head --block --node-ip-address="${address%:*}" --port=6379 --include-dashboard=false &
until srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap ray status --address="$address" > /dev/null 2>&1; do
    sleep 2
done
if ((SLURM_NNODES > 1)); then
    srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$head" --overlap \
        ray start --block --address="$address" &
fi

# Workers that join late are no trouble: podium waits for its places up to runtime.start_s. Slurm's warning before the end
# of the job reaches podium as SIGTERM: it commits and ends, and `podium resume` goes on in the next job.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    podium train "$settings" --runtime.name=ray --runtime.address="$address" "$@" &
driver=$!
trap 'kill -TERM $driver' TERM
wait $driver || { code=$?; wait $driver 2> /dev/null || true; exit $code; }
