"""The subcommands of ``pagoda``: a module each, with `add_arguments(parser)` and `run(args, parser) -> exit code`."""
