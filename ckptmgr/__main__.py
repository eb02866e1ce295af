"""`python -m ckptmgr`: the same as the console script `ckptmgr`."""

import sys

from ckptmgr.cli import main

sys.exit(main())
