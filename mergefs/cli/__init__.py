"""The command line. Each command's module is imported when the command runs, so that `mergefs --help` is fast."""

from __future__ import annotations

import importlib
import sys

import click

_COMMANDS = {
    "init": ("repository", "Make a repository in a new folder."),
    "ingest": ("models", "Take in a checkpoint."),
    "recipe": ("recipes", "Tell what a recipe means (recipe check FILE)."),
    "plan": ("merging", "Resolve a recipe into a plan without running it."),
    "explain": ("merging", "Show what a plan reads and skips, and why."),
    "merge": ("merging", "Merge models by a recipe."),
    "refine": ("merging", "Merge again with a larger budget, reading deeper."),
    "materialize": ("merging", "Derive and store every block of a lazy merge."),
    "mount": ("serving", "Mount a model, or everything, as read-only files."),
    "umount": ("serving", "End a mount."),
    "mounts": ("serving", "List what is mounted."),
    "edit": ("editing", "Mount a model as files that can be changed."),
    "commit": ("editing", "Make a model of what was changed."),
    "discard": ("editing", "Drop what was changed."),
    "sessions": ("editing", "List the sessions that were not committed yet."),
    "export": ("serving", "Write a model as an ordinary directory."),
    "verify-export": ("serving", "Compare an exported directory with its model."),
    "push": ("transferring", "Send a model to another repository or an archive."),
    "pull": ("transferring", "Fetch a model from another repository or an archive."),
    "ls": ("models", "List the refs."),
    "show": ("models", "Describe a model."),
    "log": ("models", "Show where a model came from."),
    "diff": ("models", "Show which tensors and blocks differ between two models."),
    "tag": ("models", "Give a model another name."),
    "rm": ("models", "Remove refs."),
    "gc": ("repository", "Free what nothing needs."),
    "repack": ("repository", "Store experts smaller, or to be read faster."),
    "fsck": ("repository", "Check the repository, and mend it."),
    "catalog": ("repository", "Make the catalog anew (catalog rebuild)."),
    "migrate": ("repository", "Bring a repository of an earlier version to this one."),
    "stats": ("repository", "Show how much the repository holds."),
}


_LONGEST_MESSAGE = 4000
"""Characters: a message may quote what a stranger wrote."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"mergefs.cli.{_COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-R", "--repo", metavar="DIR", envvar="MERGEFS_REPO", help="The repository's folder.")
@click.option(
    "--no-sync",
    is_flag=True,
    envvar="MERGEFS_NO_SYNC",
    help="Flush nothing to the disk: faster, and a power cut may destroy the repository.",
)
@click.option(
    "--check-blocks",
    type=click.Choice(["always", "sampled", "never"]),
    envvar="MERGEFS_CHECK_BLOCKS",
    help="Compare experts' blocks with their ids in merges (default: sampled).",
)
@click.version_option(package_name="mergefs")
@click.pass_context
def cli(ctx: click.Context, repo: str | None, no_sync: bool, check_blocks: str | None) -> None:
    """Ingest checkpoints once, merge them under a read budget, serve the result as files and arrays.

    The repository is the one given with -R or MERGEFS_REPO, or the nearest folder upwards that is one.
    """
    ctx.obj = repo


def main() -> None:
    """Run the command line and exit: 0, 1 for our fault, 2 for the user's."""
    from mergefs.errors import MergefsError
    from mergefs.parts import cut

    try:
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        click.echo("mergefs: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        click.echo(f"mergefs: {printable(error.format_message())}", err=True)
        sys.exit(error.exit_code)
    except MergefsError as error:
        click.echo(f"mergefs: {printable(cut(str(error), _LONGEST_MESSAGE))}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("mergefs: interrupted", err=True)
        sys.exit(130)
    except OSError as error:
        where = f": {error.filename}" if error.filename else " (is the disk full, or the repository unwritable?)"
        click.echo(f"mergefs: {printable((error.strerror or str(error)) + where)}", err=True)
        sys.exit(1)


def printable(text: str, *, keep: str = "") -> str:
    """Return text without anything that a terminal would obey, but for the characters in `keep`."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)
