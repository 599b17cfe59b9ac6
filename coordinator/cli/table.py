"""Columns and colours for what the commands print. Pure."""

from collections.abc import Sequence

BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def columns(rows: Sequence[tuple[str, ...]], *, right_from: int) -> list[str]:
    """Cells in columns two spaces apart; from column `right_from` on they are numbers, flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index >= right_from else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def paint(text: str, colour: str, colours: bool) -> str:
    return f"{colour}{text}{RESET}" if colours else text
