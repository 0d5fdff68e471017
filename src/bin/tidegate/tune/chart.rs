//! The points as a picture: excess above, shortfall below, against the sync interval.

use plotters::coord::Shift;
use plotters::prelude::*;

use super::measure::{INTERVALS_MS, Point, Way};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawError = Box<dyn std::error::Error>;

const SIZE_PX: (u32, u32) = (900, 800);
const LEGEND_PX: u32 = 30;
const FONT: (&str, u32) = ("sans-serif", 14);
const TITLE_FONT: (&str, u32) = ("sans-serif", 18);
/// A line's sample in the legend, and how wide a letter is about.
const SAMPLE_PX: i32 = 24;
const LETTER_PX: i32 = 8;

/// What may be written beside an axis, in %.
const TICKS: [f64; 18] = [
    0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4,
    1e5,
];
/// Ticks are no closer to each other than this part of the axis.
const TICK_GAP_PART: f64 = 0.07;
/// Air below 0, so that points on it are seen whole, and above the highest one.
const AIR_PART: f64 = 0.06;

/// Blue, orange and green that are told apart by colour-blind eyes (Okabe and Ito 2008), and grey
/// for what is only compared with.
const COLORS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(230, 159, 0), RGBColor(0, 158, 115), RGBColor(130, 130, 130)];
/// The first ones wider, so that they are seen below those that lie on them.
const WIDTHS_PX: [u32; 4] = [7, 4, 2, 2];
const ALLOWED: RGBAColor = RGBAColor(200, 0, 0, 0.8);

/// Of a figure's axis.
struct Axis {
    title: &'static str,
    of: fn(&Point) -> f64,
    /// The most that is allowed, if anything is forbidden.
    allowed: Option<f64>,
}

/// The most that is allowed of each figure, in %.
pub(crate) struct Allowed {
    pub(crate) excess_pct_of_burst: f64,
    pub(crate) shortfall_pct: Option<f64>,
}

/// Where a figure stands on its axis: linear below 1%, logarithmic above, so that what is a
/// thousand times worse leaves room to see the rest.
fn height(pct: f64) -> f64 {
    pct.ln_1p()
}

/// An axis by [`height`] has this for its minus infinity.
const BOTTOMLESS_PCT: f64 = -1.0;

/// The picture of `points` as SVG; the one at index `marked` is told apart.
pub(crate) fn svg(
    title: &str,
    points: &[Point],
    marked: Option<usize>,
    allowed: &Allowed,
) -> Result<String, DrawError> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE_PX).into_drawing_area();
        area.fill(&WHITE)?;
        let area = area.margin(8, 0, 0, 0).titled(title, TITLE_FONT)?;
        let (legend, area) = area.split_vertically(LEGEND_PX);
        draw_legend(&legend, marked.is_some())?;
        let axes = [
            Axis {
                title: "excess, % of burst (log)",
                of: |point| point.worst.excess_pct_of_burst,
                allowed: Some(allowed.excess_pct_of_burst),
            },
            Axis {
                title: "shortfall, % of ideal (log)",
                of: |point| point.worst.shortfall_pct(),
                allowed: allowed.shortfall_pct,
            },
        ];
        for (area, axis) in area.split_evenly((2, 1)).iter().zip(&axes) {
            draw(area, axis, points, marked.map(|index| &points[index]))?;
        }
        area.present()?;
    }
    Ok(svg)
}

/// One legend for both axes, beside no line.
fn draw_legend(area: &Area<'_>, is_marked: bool) -> Result<(), DrawError> {
    let (mut x, y) = (70, LEGEND_PX as i32 / 2);
    let ways = Way::ALL.into_iter().zip(COLORS).zip(WIDTHS_PX);
    let lines = ways.map(|((way, color), width)| (way.name, color.stroke_width(width)));
    for (name, style) in lines.chain([("the most allowed", ALLOWED.stroke_width(1))]) {
        area.draw(&PathElement::new([(x, y), (x + SAMPLE_PX, y)], style))?;
        x = draw_name(area, name, (x + SAMPLE_PX, y))?;
    }
    if is_marked {
        area.draw(&Circle::new((x + SAMPLE_PX / 2, y), 7, BLACK.stroke_width(2)))?;
        draw_name(area, "recommended", (x + SAMPLE_PX, y))?;
    }
    Ok(())
}

/// Writes a name beside its sample and returns where the next sample begins.
fn draw_name(area: &Area<'_>, name: &str, (x, y): (i32, i32)) -> Result<i32, DrawError> {
    area.draw(&Text::new(name.to_owned(), (x + 6, y - FONT.1 as i32 / 2), FONT))?;
    Ok(x + 6 + LETTER_PX * name.len() as i32 + SAMPLE_PX)
}

/// Where the axis is marked, up to its top.
fn ticks(top: f64) -> Vec<f64> {
    let gap = TICK_GAP_PART * height(top);
    let mut ticks: Vec<f64> = Vec::new();
    for tick in TICKS.into_iter().filter(|&tick| tick <= top) {
        if ticks.last().is_none_or(|&last| height(tick) - height(last) >= gap) {
            ticks.push(tick);
        }
    }
    ticks
}

fn draw(
    area: &Area<'_>,
    axis: &Axis,
    points: &[Point],
    marked: Option<&Point>,
) -> Result<(), DrawError> {
    let intervals = INTERVALS_MS.map(|interval_ms| interval_ms as f64);
    let (first, last) = (intervals[0] * 0.9, intervals[INTERVALS_MS.len() - 1] * 1.1);
    // An axis even if all is 0.
    let highest = points.iter().map(axis.of).chain(axis.allowed).fold(0.1, f64::max);
    let air = AIR_PART * height(highest);
    let (bottom, top) = ((-air).exp_m1(), (height(highest) + air).exp_m1());
    let x = (first..last).log_scale().with_key_points(intervals.to_vec());
    let y = (bottom..top).log_scale().zero_point(BOTTOMLESS_PCT).with_key_points(ticks(top));
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(INTERVALS_MS.len())
        .y_labels(TICKS.len())
        .x_label_formatter(&|interval_ms| format!("{interval_ms:.0}"))
        .y_label_formatter(&|pct| pct.to_string())
        .x_desc("sync interval, ms")
        .y_desc(axis.title)
        .label_style(FONT)
        .draw()?;
    if let Some(allowed) = axis.allowed {
        let line = [(first, allowed), (last, allowed)];
        chart.draw_series(LineSeries::new(line, ALLOWED.stroke_width(1)))?;
    }
    for ((way, color), width) in Way::ALL.into_iter().zip(COLORS).zip(WIDTHS_PX) {
        let line: Vec<(f64, f64)> = points
            .iter()
            .filter(|point| point.way == way)
            .map(|point| (point.interval_ms as f64, (axis.of)(point)))
            .collect();
        let dots = line.iter().map(|&at| Circle::new(at, width / 2 + 2, color.filled()));
        chart.draw_series(dots.collect::<Vec<_>>())?;
        chart.draw_series(LineSeries::new(line, color.stroke_width(width)))?;
    }
    if let Some(point) = marked {
        let at = (point.interval_ms as f64, (axis.of)(point));
        chart.draw_series([Circle::new(at, 10, BLACK.stroke_width(2))])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate::sim::Worst;

    #[test]
    fn the_picture_names_its_axes_its_policies_and_the_recommended_point() {
        let worst = Worst { admitted_vs_ideal_pct: 97.0, ..Worst::NONE };
        let point =
            |way| INTERVALS_MS.map(|interval_ms| Point { way, interval_ms, worst, faulty: None });
        let points: Vec<Point> = Way::ALL.into_iter().flat_map(point).collect();
        let allowed = Allowed { excess_pct_of_burst: 1.0, shortfall_pct: None };
        let svg = svg("20 nodes", &points, Some(3), &allowed).unwrap();
        let texts = ["20 nodes", "excess, % of burst", "shortfall", "sync interval", "default"];
        for text in texts.into_iter().chain([
            "strict",
            "async",
            "write-behind",
            "recommended",
            "1000",
            "</svg>",
        ]) {
            assert!(svg.contains(text), "{text} is not in the picture");
        }
        assert!(!super::svg("none", &points, None, &allowed).unwrap().contains("recommended"));
    }
    #[test]
    fn an_axis_is_marked_from_0_to_its_top_with_room_between_the_marks() {
        for highest in [0.1, 1.0, 60.0, 1500.0] {
            let ticks = ticks(highest * 1.1);
            assert!((2..=12).contains(&ticks.len()), "{highest}: {ticks:?}");
            assert!(ticks[0].abs() < 1e-9 && ticks.iter().all(|tick| *tick <= highest));
        }
    }
}
