"""Draws the two pictures of the documentation's first page: slices of one model, and what InCo mixes.

usage: python docs/drawings.py
"""

from pathlib import Path

IMAGES = Path(__file__).parent / "images"
BLUE, LIGHT, ORANGE, GREY, TEXT = "#0072b2", "#cfe3f0", "#d55e00", "#9a9a9a", "#222222"
STYLE = f'font-family="system-ui, sans-serif" font-size="14" fill="{TEXT}"'


def rectangle(x: float, y: float, width: float, height: float, fill: str, stroke: str = BLUE) -> str:
    """One block of a network."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{stroke}"/>'


def words(x: float, y: float, text: str, anchor: str = "middle", colour: str = TEXT) -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = TEXT) -> str:
    """A straight arrow."""
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{colour}" stroke-width="2" marker-end="url(#tip)" fill="none"/>'


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole SVG file, with its title for those who cannot see it."""
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += f'<path d="M0 0 L8 4 L0 8 z" fill="{TEXT}"/></marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {STYLE}>'
    back = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{title}</title>", f"<defs>{tip}</defs>", back, *parts, "</svg>"]) + "\n"


def slicing() -> str:
    """The server model, and the three parts of it that three kinds of devices train."""
    devices = [
        ("phone: first blocks", (1, 1), 1.0),
        ("tablet: narrower layers", (3, 3), 0.5),
        ("workstation: all of it", (3, 3), 1.0),
    ]
    parts = [words(110, 24, "server model")]
    columns = [(110, (3, 3), 1.0), *((330 + 190 * n, depth, width) for n, (_, depth, width) in enumerate(devices))]
    for centre, depth, width in columns:
        for stage in range(2):
            for block in range(3):
                y = 40 + 126 * stage + 40 * block
                held = block < depth[stage]
                parts.append(rectangle(centre - 60, y, 120, 30, "#ffffff", GREY))
                if held:
                    parts.append(rectangle(centre - 60, y, 120 * width, 30, LIGHT if stage == 0 else BLUE))
    for number, (name, _, _) in enumerate(devices):
        parts.append(words(330 + 190 * number, 24, name))
    parts += [arrow(180, 100, 258, 100), words(219, 90, "slice"), arrow(258, 220, 180, 220), words(219, 244, "update")]
    parts.append(words(390, 312, "each position of the server model is averaged over those who trained it"))
    title = (
        "One server model with two stages of three blocks; a phone trains the first block of each stage, a tablet the "
    )
    return picture(800, 330, f"{title}first half of the channels of all blocks, a workstation all of it", parts)


def inco() -> str:
    """The update of a deep block is mixed with that of the first of its shape, which more clients trained."""
    rows = [
        ("block 1", "trained by all", 1.0),
        ("block 2", "by tablets and workstations", 0.6),
        ("block 3", "by workstations", 0.25),
    ]
    parts = [words(110, 24, "a stage"), words(330, 24, "who trained it"), words(610, 24, "its update on the server")]
    for number, (name, who, share) in enumerate(rows):
        y = 40 + 80 * number
        parts += [rectangle(50, y, 120, 50, LIGHT), words(110, y + 30, name)]
        parts += [rectangle(230, y + 8, 200, 14, "#ffffff", GREY), rectangle(230, y + 8, 200 * share, 14, BLUE)]
        parts.append(words(230, y + 42, who, "start"))
        parts += [rectangle(520, y, 180, 50, "#ffffff", ORANGE if number else BLUE)]
        parts.append(words(610, y + 30, "g0" if not number else f"g{number} mixed with g0", "middle"))
    for bow, y in ((760, 142), (790, 222)):
        bent = f"M700 65 C{bow} 90 {bow} {y - 20} 704 {y}"
        parts.append(f'<path d="{bent}" fill="none" stroke="{ORANGE}" stroke-width="2" marker-end="url(#tip)"/>')
    parts.append(
        words(400, 302, "the shallow update g0 steadies the deep ones; clients send nothing more and do nothing else")
    )
    return picture(
        800, 320, "InCo mixes the update of each deep block with that of the first block of its stage", parts
    )


PICTURES = {"slicing.svg": slicing, "inco.svg": inco}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
