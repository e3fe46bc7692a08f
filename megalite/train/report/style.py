"""How a report looks: one style sheet, light or dark as the reader's system is, for a phone as for a wide screen.

Text has a contrast of at least 4.5 to 1 to what is behind it, lines of charts at least 3 to 1 (tests/train/report). The
classes b, f, s, t, r and a number colour a background, an area, a stroke, a text, a rank.
"""

LIGHT = {
    "page": "#f5f6f8",
    "card": "#ffffff",
    "ink": "#18202b",
    "quiet": "#566273",
    "edge": "#dfe4ea",
    "good": "#1e7a4a",
    "bad": "#b93434",
    "warn": "#8f5a00",
}
DARK = {
    "page": "#0e1319",
    "card": "#171e27",
    "ink": "#e7ebf0",
    "quiet": "#9ca9b8",
    "edge": "#2c3744",
    "good": "#5fca91",
    "bad": "#f28b8b",
    "warn": "#e8b25c",
}
SERIES = (  # of lines and areas: (light, dark)
    ("#2a6ab3", "#6cabf2"),
    ("#c4640e", "#f2a45a"),
    ("#22814f", "#5cc98d"),
    ("#c23b3b", "#f28585"),
    ("#7a51b0", "#b99af0"),
    ("#0f7f90", "#4fc3d3"),
    ("#b0407f", "#ea8fc8"),
    ("#5d6977", "#a3b0be"),
    ("#7d7a12", "#cdca5e"),
    ("#86603f", "#cfa684"),
)


def _variables(names: dict[str, str], shade: int) -> str:
    colours = [*names.items(), *((f"c{at}", pair[shade]) for at, pair in enumerate(SERIES))]
    return "".join(f"--{name}:{value};" for name, value in colours)


def _coloured() -> str:
    return "".join(
        f".b{at}{{background:var(--c{at})}}.f{at}{{fill:var(--c{at})}}.s{at}{{stroke:var(--c{at})}}"
        f".t{at}{{fill:var(--c{at})}}.r{at}{{stroke:var(--c{at});fill:color-mix(in srgb,var(--c{at}) 18%,var(--card))}}"
        for at in range(len(SERIES))
    )


_PAGE = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,header.top,footer{max-width:1280px;margin:0 auto;padding:0 20px}
header.top{padding-top:22px}
h1{font-size:1.6rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.12rem;margin:30px 0 10px}
h3{font-size:.95rem;margin:0 0 6px}
a{color:var(--c0)}
p{margin:6px 0}
.quiet,small{color:var(--quiet)}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
code{overflow-wrap:anywhere}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;tab-size:4}
.row{display:flex;flex-wrap:wrap;gap:8px 14px;align-items:center}
.pill{border-radius:99px;padding:2px 12px;font-size:.85rem;font-weight:600;border:1px solid currentColor}
.pill.good{color:var(--good)}.pill.bad{color:var(--bad)}.pill.warn{color:var(--warn)}.pill.run{color:var(--c0)}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0 0;font-size:.9rem}
nav a{text-decoration:none;padding:3px 0}nav a:hover{text-decoration:underline}
.progress{height:8px;border-radius:4px;background:var(--edge);overflow:hidden;margin:14px 0 4px}
.progress i{display:block;height:100%;background:var(--c0)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:10px;margin:16px 0 0;padding:0}
.tiles div,.card{background:var(--card);border:1px solid var(--edge);border-radius:10px;min-width:0}
.tiles div{padding:10px 13px}
.tiles dt{color:var(--quiet);font-size:.82rem}
.tiles dd{margin:0;font-size:1.3rem;font-weight:600;line-height:1.35;font-variant-numeric:tabular-nums;
 overflow-wrap:anywhere}
.tiles small{display:block;font-weight:400;font-size:.8rem;line-height:1.35}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:12px}
.card{padding:12px 14px}
.wide{grid-column:1/-1}
.beside{display:grid;grid-template-columns:minmax(0,3fr) minmax(0,2fr);gap:6px 26px;align-items:center}
.beside .legend{flex-direction:column}
.narrow{display:none}
svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--quiet)}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}svg .strong{fill:var(--ink);font-weight:600}
.grid{stroke:var(--edge);fill:none;stroke-width:1}
.floor{stroke:var(--quiet);fill:none;stroke-width:1}
.curve{fill:none;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}
.faint{fill:none;stroke-width:1;opacity:.45;stroke-linejoin:round}
.band{opacity:.16}
.area{opacity:.85}
.dot{stroke:var(--card);stroke-width:1}
.stripe{fill:transparent}
.tip>:not(.stripe){visibility:hidden;pointer-events:none}
.tip:hover>*{visibility:visible}
.cross{stroke:var(--quiet);stroke-dasharray:3 3;fill:none}
.box{fill:var(--card);stroke:var(--edge)}
.legend{list-style:none;margin:4px 0 2px;padding:0;display:flex;flex-wrap:wrap;gap:2px 16px;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:6px;overflow-wrap:anywhere;min-width:0}
.legend i{width:12px;height:12px;border-radius:3px;flex:none}
.legend b{font-weight:600;font-variant-numeric:tabular-nums}
.bar{display:flex;height:18px;border-radius:5px;overflow:hidden;margin:6px 0;background:var(--edge)}
.bar i{display:block;height:100%}
figure{margin:0}
figcaption{font-size:.85rem;margin:0 0 6px;color:var(--quiet)}
figcaption b{color:var(--ink);display:block}
.layout{margin:0}
.node{fill:var(--page);stroke:var(--edge)}
.rank{fill:var(--page);stroke:var(--quiet);stroke-width:1.4}
.link{fill:none;stroke-width:2}
.dashed{stroke-dasharray:5 3}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;vertical-align:top;padding:5px 14px 5px 0;border-bottom:1px solid var(--edge)}
tr:last-child>th,tr:last-child>td{border-bottom:0}
th{font-weight:600}thead th{color:var(--quiet);font-weight:400}
td:last-child{overflow-wrap:anywhere}
tbody th{width:1%}
td.figure,th.figure{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
tbody th{font-weight:400;color:var(--quiet);white-space:nowrap}
.set{font-weight:600}.whole{white-space:nowrap}
.sample{border-left:3px solid var(--edge);padding:2px 0 2px 12px;margin:8px 0 14px}
.sample b{font-weight:600;color:var(--c0)}
.bad{color:var(--bad)}.warn{color:var(--warn)}.good{color:var(--good)}
details{margin:8px 0}summary{cursor:pointer;padding:3px 0}
footer{padding:26px 20px 40px;font-size:.85rem;color:var(--quiet)}
@media(max-width:640px){
 main,header.top,footer{padding-left:12px;padding-right:12px}
 .beside{grid-template-columns:minmax(0,1fr)}
 .broad{display:none}.narrow{display:block}
 .tiles{grid-template-columns:repeat(2,minmax(0,1fr))}
 .tiles dd{font-size:1.12rem}
 .card{padding:10px}
 tbody th{white-space:normal}
}
@media print{body{background:#fff}.card,.tiles div{break-inside:avoid}nav{display:none}}
"""

STYLE = (
    f":root{{{_variables(LIGHT, 0)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_variables(DARK, 1)}}}}}"
    + "".join(line.strip() for line in _PAGE.splitlines())
    + _coloured()
)
