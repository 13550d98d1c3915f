"""The document's tables: which cells each needs, its rows as measured, and the document's figures beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamina.study.bounds import BoundRow, assumption_rows, bound_rows
from lamina.study.cells import DOCUMENT_RATE, Cell, Result, ResultStore, StudySize, column
from lamina.study.methods import METHODS
from lamina.study.statistics import interval, least_wilcoxon_p, wilcoxon_p

Row = list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTable:
    """A table as measured. `cells` says what has to be measured first, `rows` makes the rows of it."""

    name: str
    title: str
    heads: tuple[str, ...]
    paper_heads: tuple[str, ...]  # the columns that the document has too, in its order
    paper: Mapping[str, tuple[str, ...]]  # our row → the document's figures, as printed
    why: str  # why ours differ
    cells: Callable[[StudySize], list[Cell]]
    rows: Callable[[ResultStore], list[Row]]

    def markdown(self, store: ResultStore) -> str:
        """The table with the document's figures in the last columns."""
        heads = [*self.heads, *(f"document: {name}" for name in self.paper_heads)]
        inputs = store.size.describe(trained=bool(self.cells(store.size)))
        lines = [f"## {self.title}", "", inputs, "", _line(heads), _line(["---"] * len(heads))]
        for row in self.rows(store):
            theirs = self.paper.get(row[0], ("–",) * len(self.paper_heads))
            lines.append(_line([*row, *theirs]))
        return "\n".join([*lines, "", self.why, ""])


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def over_seeds(store: ResultStore, cell: Cell) -> list[Result]:
    """The results of a cell with every seed; those that are missing or refused are left out."""
    found = (store.get(replace(cell, seed=seed)) for seed in store.size.seeds)
    return [result for result in found if result is not None and "refused" not in result]


def refusal(store: ResultStore, cell: Cell) -> str:
    """Why a cell could not be run, if it could not."""
    found = (store.get(replace(cell, seed=seed)) for seed in store.size.seeds)
    return next((str(result["refused"]) for result in found if result and "refused" in result), "")


def shown(results: Sequence[Mapping[str, Any]], name: str) -> str:
    """Mean and 95 % limits over seeds; of p-values, whose mean says nothing, the smallest and the largest."""
    values = column(results, name)
    if name == "mia_p" and values:
        return "–".join(dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values))))
    found = interval(values)
    return "–" if found is None else str(found)


def _method_rows(
    store: ResultStore, methods: Sequence[str], base: str, names: Sequence[str], **where: Any
) -> list[Row]:
    reference = over_seeds(store, Cell(method=base, **where))
    rows = []
    for method in methods:
        found = over_seeds(store, Cell(method=method, **where))
        why = refusal(store, Cell(method=method, **where))
        if not found and why:
            rows.append([METHODS[method].title, f"refused: {why}", *[""] * len(names)])
            continue
        p = wilcoxon_p(column(found, "mse"), column(reference, "mse")) if method != base else None
        rows.append([METHODS[method].title, *(shown(found, name) for name in names), "–" if p is None else f"{p:.3g}"])
    return rows


FIVE_SEEDS = (
    "Wilcoxon's signed-rank test on pairs of seeds cannot give a p below {least:.4g} with {n} seeds, so the document's "
    "p < 0.01 from five seeds cannot be had (five give 0.0625 at best)."
)


def _wilcoxon_note(size: StudySize) -> str:
    return FIVE_SEEDS.format(least=least_wilcoxon_p(len(size.seeds)), n=len(size.seeds))


# ---------------------------------------------------------------------------------------------------- Tables 5 and 9

TABLE5 = ("none", "global", "rdp", "uniform", "quantile", "fedavg", "opacus", "flat", "pareto", "ladp", "routed", "lsab",
          "printed")  # fmt: skip
TABLE8 = ("lsab-printed", "lsab-global", "lsab-gamma", "lsab-equal", "lsab-gamma-norm", "uniform", "lsab")
PRETRAINED5 = ("public", "laplace")  # rows of a size that begins with weights from simulated patients
SHALLOW = {"architecture": "stacked", "depth": 6, "activation": "relu"}  # whose global constants are finite
TABLE9 = ("uniform", "quantile", "flat", "lsab")
ARCHITECTURES = (  # name, depth, activation, as the document's Table 7 has them
    ("stacked", 8, "relu"), ("convolutional", 10, "relu"), ("residual", 12, "gelu"), ("transformer", 8, "silu"),
    ("vae", 6, "gelu"),
)  # fmt: skip


def _table5_methods(size: StudySize) -> tuple[str, ...]:
    return (*TABLE5, *PRETRAINED5) if size.pretrain else TABLE5


def _table8_cells(size: StudySize) -> list[Cell]:
    shallow = [Cell(method=m, seed=s, **SHALLOW) for m in ("lsab", "lsab-global") for s in size.seeds]  # type: ignore[arg-type]
    return _seeded(size, TABLE8) + (shallow if size.pretrain else [])


def _seeded(size: StudySize, methods: Sequence[str]) -> list[Cell]:
    return [Cell(method=method, seed=seed) for method in methods for seed in size.seeds]


def _table5(store: ResultStore) -> list[Row]:
    names = ("auc", "mse", "delta_tight", "delta_worst", "rho", "epsilon", "mia", "mia_p")
    return _method_rows(store, _table5_methods(store.size), "uniform", names)


def _table8(store: ResultStore) -> list[Row]:
    names = ("auc", "mse", "rho", "epsilon", "noise_power")
    rows = _method_rows(store, TABLE8, "lsab-printed", names)
    if store.size.pretrain:
        shallow = _method_rows(store, ("lsab", "lsab-global"), "lsab", names, **SHALLOW)
        rows += [[f"{row[0]}, stacked model of {SHALLOW['depth']} layers", *row[1:]] for row in shallow]
    return rows


def _table9(store: ResultStore) -> list[Row]:
    rows = []
    for method in TABLE9:
        found = interval(column(over_seeds(store, Cell(method=method)), "auc"))
        if found is not None:
            row = [METHODS[method].title, f"{found.mean:.3f}", f"±{found.std:.3f}"]
            rows.append([*row, f"{100 * found.std / found.mean:.2f}%"])
    return rows


# --------------------------------------------------------------------------------------------------------- Table 7


TABLE7_METHODS = ("lsab", "uniform", "flat")


def architecture_cell(name: str, depth: int, activation: str, method: str) -> Cell:
    return Cell(method=method, architecture=name, depth=depth, activation=activation)


def _table7_cells(size: StudySize) -> list[Cell]:
    cells = [architecture_cell(*each, method) for each in ARCHITECTURES for method in TABLE7_METHODS]
    return [replace(cell, seed=seed) for cell in cells for seed in size.seeds]


def _table7(store: ResultStore) -> list[Row]:
    rows = []
    for name, depth, activation in ARCHITECTURES:
        ours, even, flat = (
            over_seeds(store, architecture_cell(name, depth, activation, method)) for method in TABLE7_METHODS
        )
        title = f"{name} ({depth}, {activation})"
        if not ours:
            why = refusal(store, architecture_cell(name, depth, activation, "lsab"))
            rows.append([title, f"LSAB refused: {why}" if why else "–", "", "", "", "", shown(flat, "auc"), ""])
            continue
        tight, worst = column(ours, "delta_tight"), column(ours, "delta_worst")
        ratio = f"{sum(tight) / sum(worst):.3g}" if worst and len(worst) == len(tight) else "–"
        naive, mine = interval(column(even, "auc")), interval(column(ours, "auc"))
        against = "–" if naive is None or mine is None else f"{100 * (mine.mean / naive.mean - 1):+.1f}%"
        row = [title, shown(ours, "auc"), shown(ours, "mse"), shown(ours, "rho"), shown(ours, "delta_tight"), ratio]
        rows.append([*row, shown(flat, "auc"), against])
    return rows


# ----------------------------------------------------------------------------------------------------- Tables 1 and 6


def _table6(store: ResultStore) -> list[Row]:
    def row(found: BoundRow) -> Row:
        return [
            f"{found.activation} {found.depth}", f"{found.worst:.4g}", f"{found.loose:.4g}", f"{found.printed:.4g}",
            f"{found.tight:.4g}",
            f"{found.tight / found.worst:.3g}", f"{100 * (1 - (found.tight / found.worst) ** 2):.1f}%",
        ]  # fmt: skip

    return [row(each) for each in bound_rows(store.size)]


DEPENDENCIES = (
    ("Def. 2, eq. 7–10", "A1, A2, A3", "dominated convergence; Gaussian integrals", "Lemma 1",
     "eq. 7 needs A2 alone when it is taken over the inputs; it is a mean, no bound. Eq. 10 is wrong: r³ for r"),
    ("Thm. 3, eq. 11–13", "A1, A2, A3; Lemma 1", "mean value theorem; spectral norms; triangle inequality", "Lemma 2, Prop. 1",
     "with the largest slope for the mean, a+b for √(a²+b²), and no γ"),
    ("Thm. 4, eq. 14–15", "Thm. 3; Lemma 1", "telescoping product; slope ratio ≤ 1", "Lemma 3, Prop. 2",
     "as a ratio of two products; 0.000132 is 7,580 times, not 4.7 times"),
    ("Thm. 5, eq. 16–17", "Thm. 3; Thm. 2", "KKT conditions; Lagrange multipliers", "Prop. 3",
     "the optimum of eq. 17 for any thresholds; eq. 16 is not that optimum and spends more than ρ_cap"),
    ("Eq. 20", "A1, A3; peaked softmax", "spectral norm of the softmax Jacobian; a(1−a) ≤ ¼", "Prop. 4",
     "the norm lies between max a(1−a) and twice that, up to ½; no assumption is needed"),
)  # fmt: skip


def no_cells(size: StudySize) -> list[Cell]:
    return []


_CLIPPING = (
    "Why ours differ. In the document the thresholds are its Δ, so a smaller Δ seems to need less noise. But what a "
    "contribution can move is what it is clipped to, whatever Δ is, and clipping to less keeps less of the gradient: at "
    "equal ε the noise relative to what is kept does not shrink with Δ. Here every method has the same true ε and the "
    "same bound on a whole contribution."
)

TABLES = {
    table.name: table
    for table in (
        StudyTable(
            name="table1", title="Table 1. What each result of the document depends on, and what holds",
            heads=("result", "assumptions", "inequality or tool", "the document's proof", "what holds"),
            paper_heads=(), paper={}, cells=no_cells, rows=lambda store: [list(row) for row in DEPENDENCIES],
            why="The first four columns are the document's own map. A1: the distribution of pre-activations has a density. "
                "A2: activations are Lipschitz, and differentiable almost everywhere. A3: pre-activations are Gaussian. No "
                "guarantee of Lamina needs any of the three: clipping makes a step private, whatever Δ is.",
        ),
        StudyTable(
            name="assumptions", title="Assumptions A1 to A3, checked for each activation",
            heads=("activation", "A1: no value has more than 1 %; the most frequent", "A2: steepest slope seen, of the constant",
                   "A3: within 0.1 of a Gaussian (Kolmogorov)", "mean slope over the inputs (definition 2)",
                   "over the Gaussian fit (A3)"),
            paper_heads=(), paper={}, cells=no_cells, rows=lambda store: assumption_rows(store.size),
            why="A fully connected autoencoder of 12 layers with GELU at its first weights. Δ tight uses the mean slopes over "
                "the inputs, which need no A3; the Gaussian fit is `slopes=\"gaussian\"` of `lamina.measure`, and equations 8 "
                "and 10 in Δ as printed need it.",
        ),
        StudyTable(
            name="table5", title="Table 5. Methods at ε = 1, residual autoencoder of 12 layers, ECG",
            heads=("method", "AUC", "MSE", "Δ tight", "Δ global", "ρ, no sampling", "true ε", "attack AUC",
                   "p of the attack (least–largest)", "p against even boxes"),
            paper_heads=("AUC", "MSE", "Δ_12", "ρ", "attack", "tightness"),
            paper={
                METHODS["none"].title: ("0.974", "0.0058", "N/A", "N/A", "0.784", "N/A"),
                METHODS["global"].title: ("0.694", "0.0348", "0.841", "0.501", "0.568", "0.214"),
                METHODS["rdp"].title: ("0.761", "0.0261", "0.698", "0.461", "0.541", "0.214"),
                METHODS["uniform"].title: ("0.784", "0.0228", "0.641", "0.437", "0.511", "0.214"),
                METHODS["quantile"].title: ("0.801", "0.0211", "0.587", "0.421", "0.508", "0.281"),
                METHODS["fedavg"].title: ("0.763", "0.0248", "0.641", "0.448", "0.519", "0.214"),
                METHODS["lsab"].title: ("0.891", "0.0141", "0.213", "0.312", "0.502", "0.978"),
            },
            why=_CLIPPING + " The document's ρ differ by method at one ε, which cannot be: ρ follows from ε and δ. Its Δ_12 of "
                "0.213 against 0.841 is a ratio of 0.253, not 0.978.",
            cells=lambda size: _seeded(size, _table5_methods(size)), rows=_table5,
        ),
        StudyTable(
            name="table6", title="Table 6. Δ of the last layer by activation and depth, fully connected",
            heads=("activation, depth", "Δ global", "Δ as printed, γ = 1", "Δ as printed", "Δ tight", "tight / global", "1 − ratio²"),
            paper_heads=("global", "RDP loose", "LSAB", "ratio", "saving"),
            paper={
                "relu 4": ("0.184", "0.152", "0.121", "0.658", "12.4%"), "relu 8": ("0.412", "0.341", "0.194", "0.471", "19.1%"),
                "relu 12": ("0.841", "0.698", "0.213", "0.253", "22.3%"), "gelu 4": ("0.198", "0.161", "0.118", "0.596", "18.2%"),
                "gelu 8": ("0.481", "0.388", "0.181", "0.376", "28.4%"), "gelu 12": ("0.891", "0.724", "0.178", "0.200", "32.1%"),
                "silu 12": ("0.864", "0.712", "0.198", "0.229", "27.8%"),
            },
            why="Why ours differ. Δ is a fact about weights and inputs, so it depends on the initialisation, the width and the "
                "size of an input, none of which the document gives. The last column is the document's definition of its "
                "saving; its own ratios do not give its savings (0.253 gives 93.6 %, not 22.3 %). The document does not define its "
                "\"RDP loose\"; the recursion with mean slopes and without γ stands for it.",
            cells=no_cells, rows=_table6,
        ),
        StudyTable(
            name="table7", title="Table 7. Architectures at ε = 1, ECG, LSAB",
            heads=("architecture", "AUC", "MSE", "ρ, no sampling", "Δ tight", "tight / global", "AUC with a flat clip",
                   "LSAB against even boxes"),
            paper_heads=("AUC", "MSE", "ρ", "Δ_L", "tightness", "vs. zCDP naive"),
            paper={
                "stacked (8, relu)": ("0.878", "0.0158", "0.298", "0.194", "0.471", "+10.8%"),
                "convolutional (10, relu)": ("0.891", "0.0141", "0.312", "0.213", "0.413", "+17.1%"),
                "residual (12, gelu)": ("0.901", "0.0128", "0.298", "0.178", "0.200", "+19.4%"),
                "transformer (8, silu)": ("0.884", "0.0148", "0.281", "0.188", "0.391", "+21.2%"),
                "vae (6, gelu)": ("0.871", "0.0171", "0.261", "0.162", "0.521", "+12.1%"),
            },
            why=_CLIPPING, cells=_table7_cells, rows=_table7,
        ),
        StudyTable(
            name="table8", title="Table 8. Parts of LSAB left out, ε = 1",
            heads=("variant", "AUC", "MSE", "ρ, no sampling", "true ε", "noise per step (norm)", "p against the first row"),
            paper_heads=("AUC", "MSE", "Δ_12", "ρ", "saving"),
            paper={
                METHODS["lsab-printed"].title: ("0.891", "0.0141", "0.213", "0.312", "28.6%"),
                METHODS["lsab-global"].title: ("0.817", "0.0224", "0.641", "0.399", "8.7%"),
                METHODS["lsab-gamma"].title: ("0.846", "0.0181", "0.312", "0.351", "19.7%"),
                METHODS["lsab-equal"].title: ("0.861", "0.0168", "0.213", "0.312", "28.6% (same ρ)"),
                METHODS["lsab-gamma-norm"].title: ("0.871", "0.0158", "0.284", "0.331", "24.3%"),
                METHODS["uniform"].title: ("0.784", "0.0228", "0.641", "0.437", "0.0%"),
            },
            why=_CLIPPING + " So no variant saves ρ: they only place thresholds and noise differently.",
            cells=_table8_cells, rows=_table8,
        ),
        StudyTable(
            name="table9", title="Table 9. Stability over seeds, AUC at ε = 1",
            heads=("method", "mean", "standard deviation", "coefficient of variation"),
            paper_heads=("mean", "std", "CV"),
            paper={
                METHODS["uniform"].title: ("0.784", "±0.011", "1.40%"),
                METHODS["quantile"].title: ("0.801", "±0.009", "1.12%"),
                METHODS["lsab"].title: ("0.891", "±0.008", "0.90%"),
            },
            why="A standard deviation from five seeds is itself uncertain by a factor of 0.6 to 2.9 (95 %): the document's order "
                "of 0.008, 0.009 and 0.011 says nothing.",
            cells=lambda size: _seeded(size, TABLE9), rows=_table9,
        ),
    )
}  # fmt: skip


def notes(size: StudySize) -> list[str]:
    """What stands below every page of tables."""
    return [
        _wilcoxon_note(size),
        "Intervals are 95 % limits of Student's t over seeds. The optimiser is the document's; the clip norm is 0.4 of the typical "
        "gradient norm on simulated patients of another seed.",
        "The learning rate follows from the signal and noise of each method's plan (lamina.run.optimizer.private_rate), "
        "times 0.05 because the weights are pre-trained."
        if size.rate is None
        else f"The learning rate is {size.rate:g}, the same for all methods"
        + (
            " and the document's."
            if size.rate == DOCUMENT_RATE
            else f", where the document has {DOCUMENT_RATE:g} and more steps."
        ),
        "BatchNorm is GroupNorm here, because BatchNorm mixes patients; patients are the unit of privacy; early stopping is left "
        "out, because watching private validation data would have to be paid for.",
    ]
