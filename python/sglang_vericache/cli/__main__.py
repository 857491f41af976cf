import sys

from sglang_vericache.cli import main

sys.exit(main())
