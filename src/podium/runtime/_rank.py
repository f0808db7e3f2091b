"""What torchrun starts: one rank of a run, told by a file what to do."""

import sys
from pathlib import Path

from podium.runtime._launch import end_process, run_rank

if __name__ == "__main__":
    end_process(run_rank(Path(sys.argv[1])))
