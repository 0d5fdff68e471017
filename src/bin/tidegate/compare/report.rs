//! What each way admitted: a table, a line of JSON, and a picture.

use std::fmt::Write;

use plotters::prelude::*;
use serde::Serialize;

use super::load::Plan;
use super::ways::Row;
use super::{CompareError, Options};
use crate::output;

/// A row as JSON has it.
#[derive(Serialize)]
struct Figures {
    algorithm: &'static str,
    way: &'static str,
    admitted: u64,
    ideal: u64,
    admitted_vs_ideal_pct: f64,
    excess_tokens: f64,
    worst_period_tokens: u64,
    store_calls_per_decision: Option<f64>,
    decision_p50_us: f64,
    decision_p99_us: f64,
}

#[derive(Serialize)]
struct Report<'a> {
    case: super::Case,
    store: &'static str,
    nodes: usize,
    keys: usize,
    interval_ms: u128,
    requests: usize,
    rows: &'a [Figures],
}

impl Figures {
    fn of(row: &Row) -> Self {
        let admitted = row.admitted_us.len() as u64;
        let rounded = |number: f64, parts: f64| (number * parts).round() / parts;
        Self {
            algorithm: row.way.rule.algorithm(),
            way: row.way.name(),
            admitted,
            ideal: row.ideal,
            admitted_vs_ideal_pct: rounded(100.0 * admitted as f64 / row.ideal.max(1) as f64, 10.0),
            excess_tokens: rounded(row.excess, 10.0),
            worst_period_tokens: row.worst_period,
            store_calls_per_decision: row.calls.map(|calls| rounded(calls, 1000.0)),
            decision_p50_us: rounded(row.p50_us, 10.0),
            decision_p99_us: rounded(row.p99_us, 10.0),
        }
    }
}

/// Writes all that was asked for.
pub(super) fn write(rows: &[Row], plan: &Plan, options: &Options) -> Result<(), CompareError> {
    if let Some(path) = &options.chart {
        let svg = picture(rows, plan).map_err(|error| CompareError::Picture(error.to_string()))?;
        std::fs::write(path, svg)
            .map_err(|error| CompareError::File { path: path.clone(), source: error.into() })?;
    }
    let figures: Vec<Figures> = rows.iter().map(Figures::of).collect();
    if options.json {
        let Plan { case, nodes, keys, .. } = *plan;
        let (store, interval_ms) = (options.store.name(), plan.interval.as_millis());
        let requests = plan.requests.len();
        output::json(&Report { case, store, nodes, keys, interval_ms, requests, rows: &figures })?;
        return Ok(());
    }
    output::write(&table(&figures))?;
    Ok(())
}

fn table(rows: &[Figures]) -> String {
    let titles = [
        "algorithm",
        "who decides",
        "admitted",
        "of ideal %",
        "excess",
        "most in a period",
        "calls/decision",
        "p50 us",
        "p99 us",
    ];
    let mut lines = vec![titles.map(str::to_owned)];
    lines.extend(rows.iter().map(|row| {
        [
            row.algorithm.to_owned(),
            row.way.to_owned(),
            row.admitted.to_string(),
            format!("{:.1}", row.admitted_vs_ideal_pct),
            format!("{:.1}", row.excess_tokens),
            row.worst_period_tokens.to_string(),
            row.store_calls_per_decision.map_or("-".to_owned(), |calls| format!("{calls:.3}")),
            format!("{:.0}", row.decision_p50_us),
            format!("{:.0}", row.decision_p99_us),
        ]
    }));
    let mut widths = [0; 9];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.len());
        }
    }
    let mut text = String::new();
    for (index, line) in lines.iter().enumerate() {
        for (column, (cell, width)) in line.iter().zip(widths).enumerate() {
            // A string takes what is written to it.
            let _ = if column < 2 {
                write!(text, "| {cell:<width$} ")
            } else {
                write!(text, "| {cell:>width$} ")
            };
        }
        text.push_str("|\n");
        if index == 0 {
            for (column, width) in widths.into_iter().enumerate() {
                let dashes = "-".repeat(width + 1);
                let _ = write!(text, "|{dashes}{}", if column < 2 { "-" } else { ":" });
            }
            text.push_str("|\n");
        }
    }
    text
}

const PANEL_PX: (u32, u32) = (900, 110);
/// Admissions are counted in so many parts of a period.
const PARTS: u64 = 10;
const BLUE_LINE: RGBColor = RGBColor(0, 114, 178);
const GREY_LINE: RGBColor = RGBColor(150, 150, 150);

/// What each way admitted over time, one below the other, with what the limit gives in the mean.
fn picture(rows: &[Row], plan: &Plan) -> Result<String, Box<dyn std::error::Error>> {
    let part_us = (plan.period_us / PARTS).max(1);
    let parts = (plan.time_us / part_us + 1) as usize;
    let counted: Vec<Vec<f64>> = rows.iter().map(|row| by_part(row, part_us, parts)).collect();
    let most = counted.iter().flatten().fold(1.0_f64, |most, count| most.max(*count));
    let size = (PANEL_PX.0, PANEL_PX.1 * rows.len().max(1) as u32 + 20);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE)?;
        let panels = area.margin(10, 10, 0, 10).split_evenly((rows.len().max(1), 1));
        for ((panel, row), counts) in panels.iter().zip(rows).zip(&counted) {
            let tokens = row.way.rule.quota().tokens() * plan.keys as u64;
            let mean = tokens as f64 / PARTS as f64;
            let name = format!(
                "{}, {}: tokens in {} ms, over seconds",
                row.way.rule.algorithm(),
                row.way.name(),
                part_us / 1000
            );
            let seconds = plan.time_us as f64 / 1e6;
            let mut chart = ChartBuilder::on(panel)
                .caption(name, ("sans-serif", 14))
                .x_label_area_size(18)
                .y_label_area_size(50)
                .build_cartesian_2d(0.0..seconds, 0.0..most)?;
            let at = |part: usize| part as f64 * part_us as f64 / 1e6;
            chart.configure_mesh().disable_mesh().y_labels(3).x_labels(9).draw()?;
            let steps = counts.iter().enumerate().flat_map(|(part, count)| {
                [(at(part), *count), (at(part + 1).min(seconds), *count)]
            });
            chart.draw_series(LineSeries::new([(0.0, mean), (seconds, mean)], GREY_LINE))?;
            chart.draw_series(LineSeries::new(steps, BLUE_LINE.stroke_width(2)))?;
        }
        area.present()?;
    }
    Ok(svg)
}

/// Admissions in each part of the time.
fn by_part(row: &Row, part_us: u64, parts: usize) -> Vec<f64> {
    let mut counts = vec![0.0; parts];
    for at_us in &row.admitted_us {
        if let Some(count) = counts.get_mut((at_us / part_us) as usize) {
            *count += 1.0;
        }
    }
    counts
}
