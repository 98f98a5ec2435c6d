"""The same by spawn: N processes started from Python, with no launcher.

python spawn.py --nproc 2
"""

from fashion import options
from with_lockstep import main

import lockstep

if __name__ == "__main__":
    args = options(nproc=2)
    lockstep.launch(main, args=(args,), nproc=args.nproc)
