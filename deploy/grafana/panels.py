"""Parts of the dashboards: three kinds of panel, each with unit, legend, description and thresholds.

In an expression `RUN` stands for the matcher of the runs chosen at the top of a dashboard and `WINDOW` for a
range that holds several scrapes at any zoom. Expressions keep the label `run` where they can, so that runs
overlay.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    FieldColor,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.models.common import (
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

TAG: Final = "penstock"
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
REPLACED: Final = {"RUN": 'run=~"$run"', "WINDOW": "$__rate_interval"}
_WIDTH, _HEIGHT = 8, 8
_NUMBER_WIDTH, _NUMBER_HEIGHT = 4, 4

Query = tuple[str, str]
"""Expression and legend."""
Limits = Sequence[tuple[float | None, str]]
"""Colour from a value on; the first from the beginning."""
Panel = timeseries.Panel | stat.Panel | heatmap.Panel
AnyPanel = TypeVar("AnyPanel", timeseries.Panel, stat.Panel, heatmap.Panel)


def below(low: float, colour: str = "red") -> Limits:
    """Return limits for a value that is wrong below `low`."""
    return ((None, colour), (low, "green"))


def above(warning: float, wrong: float | None = None) -> Limits:
    """Return limits for a value that needs attention from `warning` on and is wrong from `wrong` on."""
    return ((None, "green"), (warning, "orange"), *([] if wrong is None else [(wrong, "red")]))


def lines(
    title: str, text: str, unit: str, limits: Limits, *queries: Query, stacked: bool = False, wide: int = 1
) -> timeseries.Panel:
    """Return a panel of curves over time. wide: number of panels whose room it takes."""
    style = GraphTresholdsStyleMode.DASHED if not stacked else GraphTresholdsStyleMode.OFF
    panel = (
        timeseries.Panel()
        .thresholds_style(GraphThresholdsStyleConfig().mode(style))
        .color_scheme(FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
        .legend(_legend())
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .line_width(1)
        .fill_opacity(40 if stacked else 8)
        .show_points(VisibilityMode.AUTO)
        .span_nulls(False)
        .span(_WIDTH * wide)
        .height(_HEIGHT)
    )
    if stacked:
        panel = panel.stacking(StackingConfig().mode(StackingMode.NORMAL).group("A"))
    return _finish(panel, title, text, unit, limits, queries)


def number(title: str, text: str, unit: str, limits: Limits, query: Query) -> stat.Panel:
    """Return a panel with the last value, large, its colour by the limits."""
    panel = (
        stat.Panel()
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .color_scheme(FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .span(_NUMBER_WIDTH)
        .height(_NUMBER_HEIGHT)
    )
    return _finish(panel, title, text, unit, limits, (query,))


def heat(title: str, text: str, unit: str, limits: Limits, buckets: str) -> heatmap.Panel:
    """Return a panel of a histogram's buckets over time. buckets: their increase, by `le`."""
    panel = (
        heatmap.Panel()
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .show_legend()
        .show_tooltip()
        .span(_WIDTH)
        .height(_HEIGHT)
    )
    return _finish(panel, title, text, unit, limits, ((buckets, "{{le}}"),), PromQueryFormat.HEATMAP)


def _finish(
    panel: AnyPanel,
    title: str,
    text: str,
    unit: str,
    limits: Limits,
    queries: Sequence[Query],
    form: PromQueryFormat = PromQueryFormat.TIME_SERIES,
) -> AnyPanel:
    steps = [Threshold(value=value, color=colour) for value, colour in limits]
    panel = (
        panel.title(title)
        .description(text)
        .unit(unit)
        .datasource(SOURCE)
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    )
    for index, (expression, legend) in enumerate(queries):
        query = prometheus.Dataquery().expr(_written_out(expression)).legend_format(legend)
        query = query.range().ref_id(chr(ord("A") + index)).datasource(SOURCE)
        panel = panel.with_target(query.format(form))
    return panel


def _written_out(expression: str) -> str:
    text = " ".join(expression.split())
    for word, meaning in REPLACED.items():
        text = text.replace(word, meaning)
    return text


def _legend() -> VizLegendOptions:
    return (
        VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )


def dashboard(name: str, title: str, text: str, rows: Mapping[str, Sequence[Panel]]) -> Dashboard:
    """Return a dashboard `penstock-NAME`: rows of panels, the choice of data source and runs, links."""
    board = (
        Dashboard(title)
        .uid(f"penstock-{name}")
        .description(text)
        .tags([TAG])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .link(
            DashboardLink("Penstock")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_runs())
    )
    place = 0
    for row, panels in rows.items():
        board = board.with_row(Row(row))
        for panel in panels:
            place += 1
            board = board.with_panel(panel.id(place))
    return board


def _runs() -> QueryVariable:
    return (
        QueryVariable("run")
        .label("Run")
        .query("label_values(penstock_cpu_seconds_total, run)")
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )
