"""The plain data that both templates show: sections with tables."""

from dataclasses import dataclass

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its name; the others are figures. `wide`: it needs a line of the page for itself."""

    headers: Row
    rows: list[Row]
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page: the plot's name and what it shows, paragraphs, tables."""

    title: str
    plot: str
    plot_text: str
    text: list[str]
    tables: list[Table]
