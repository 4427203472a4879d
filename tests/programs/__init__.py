"""Programs that tests start: forked from a process that has imported their modules, or as `python -m` starts them."""
