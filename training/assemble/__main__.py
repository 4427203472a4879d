"""`python -m training.assemble`: see `training.assemble.talker`."""

import sys

from training.assemble.talker import main

sys.exit(main())
