"""One profile for all property tests: no deadline, for a busy machine is not a failure."""

from hypothesis import settings

settings.register_profile("ckptmgr", deadline=None, print_blob=True)
settings.load_profile("ckptmgr")
