//! The points as a picture: excess above, shortfall below, against the sync interval.

use plotters::coord::Shift;
use plotters::prelude::*;

use super::measure::{INTERVALS_MS, Point, Policy};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawError = Box<dyn std::error::Error>;

const SIZE_PX: (u32, u32) = (900, 760);
const FONT: (&str, u32) = ("sans-serif", 14);
const TITLE_FONT: (&str, u32) = ("sans-serif", 18);

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
        let area = area.titled(title, TITLE_FONT)?;
        let axes = [
            Axis {
                title: "excess, % of burst",
                of: |point| point.figures.excess_pct_of_burst,
                allowed: Some(allowed.excess_pct_of_burst),
            },
            Axis {
                title: "shortfall, % of ideal",
                of: |point| point.figures.shortfall_pct,
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

fn draw(
    area: &Area<'_>,
    axis: &Axis,
    points: &[Point],
    marked: Option<&Point>,
) -> Result<(), DrawError> {
    let intervals = INTERVALS_MS.map(|interval_ms| interval_ms as f64);
    let (first, last) = (intervals[0], intervals[INTERVALS_MS.len() - 1]);
    let top = points.iter().map(axis.of).chain(axis.allowed).fold(0.0, f64::max);
    // Air above the highest point, and an axis even if all is 0.
    let top = (top * 1.15).max(0.1);
    let x = (first * 0.9..last * 1.1).log_scale().with_key_points(intervals.to_vec());
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(INTERVALS_MS.len())
        .x_label_formatter(&|interval_ms| format!("{interval_ms:.0}"))
        .y_label_formatter(&|value| ((value * 1e3).round() / 1e3).to_string())
        .x_desc("sync interval, ms (logarithmic)")
        .y_desc(axis.title)
        .label_style(FONT)
        .draw()?;
    for (index, policy) in Policy::ALL.into_iter().enumerate() {
        let color = Palette99::pick(index).mix(1.0);
        let line: Vec<(f64, f64)> = points
            .iter()
            .filter(|point| point.policy == policy)
            .map(|point| (point.interval_ms as f64, (axis.of)(point)))
            .collect();
        let dots = line.iter().map(|&at| Circle::new(at, 3, color.filled()));
        chart.draw_series(dots.collect::<Vec<_>>())?;
        chart
            .draw_series(LineSeries::new(line, color.stroke_width(2)))?
            .label(policy.name())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    if let Some(allowed) = axis.allowed {
        let line = [(first * 0.9, allowed), (last * 1.1, allowed)];
        let style = BLACK.mix(0.5).stroke_width(1);
        chart
            .draw_series(LineSeries::new(line, style))?
            .label("the most allowed")
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    if let Some(point) = marked {
        let at = (point.interval_ms as f64, (axis.of)(point));
        let ring = BLACK.stroke_width(2);
        chart
            .draw_series([Circle::new(at, 8, ring)])?
            .label("recommended")
            .legend(move |(x, y)| Circle::new((x + 9, y), 6, ring));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(FONT)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::measure::PointFigures;

    #[test]
    fn the_picture_names_its_axes_its_policies_and_the_recommended_point() {
        let point = |policy| {
            INTERVALS_MS.map(|interval_ms| Point {
                policy,
                interval_ms,
                figures: PointFigures { shortfall_pct: 3.0, ..PointFigures::default() },
            })
        };
        let points: Vec<Point> = Policy::ALL.into_iter().flat_map(point).collect();
        let allowed = Allowed { excess_pct_of_burst: 1.0, shortfall_pct: None };
        let svg = svg("20 nodes", &points, Some(3), &allowed).unwrap();
        let texts = ["20 nodes", "excess, % of burst", "shortfall", "sync interval", "default"];
        for text in texts.into_iter().chain(["strict", "async", "recommended", "1000", "</svg>"]) {
            assert!(svg.contains(text), "{text} is not in the picture");
        }
        assert!(!super::svg("none", &points, None, &allowed).unwrap().contains("recommended"));
    }
}
