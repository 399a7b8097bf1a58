#!/bin/sh
# The same job inside of an allocation that you ask for yourself: sbatch inside.sh
#SBATCH --job-name=gpt
#SBATCH --nodes=9
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --time=2-00:00:00
#SBATCH --open-mode=append

holdfast run job.yaml --cluster cluster.yaml
status=$?
# 5: the allocation ended before the job, which is saved: back into the queue, to go on from there. A job that a person stopped ends with 3.
if [ "$status" -eq 5 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
