//! The sweep as a table that Markdown understands: a line for each limit, scenario and policy, with
//! the worst figures of all its cluster sizes and intervals.

use std::fmt;

use tidegate::sim::sweep::CellFigures;

use super::Report;

/// A column: its title, and a cell's figure in it.
struct Column {
    title: &'static str,
    figure: fn(&CellFigures) -> String,
}

/// Columns for rows in which something fails: they are left out if there are none.
const FAULT_COLUMNS: [Column; 5] = [
    Column { title: "bound", figure: |it| format!("{:.0}", it.excess_bound_tokens) },
    Column { title: "reachable %", figure: |it| format!("{:.1}", it.reachable_vs_ideal_pct) },
    Column { title: "synced/new key", figure: |it| format!("{:.2}", it.synced_per_invented_key) },
    Column { title: "store useful %", figure: |it| format!("{:.1}", it.store_useful_pct) },
    Column { title: "leases alive %", figure: |it| format!("{:.1}", it.leases_alive_pct) },
];

const COLUMNS: [Column; 10] = [
    Column {
        title: "excess tokens",
        figure: |figures| format!("{:.2}", figures.worst.excess_tokens),
    },
    Column { title: "% of burst", figure: |it| format!("{:.1}", it.worst.excess_pct_of_burst) },
    Column { title: "lasting s", figure: |it| format!("{:.2}", it.worst.longest_excess_s) },
    Column {
        title: "vs ideal %",
        figure: |figures| {
            let worst = &figures.worst;
            let (least, most) = (worst.admitted_vs_ideal_pct, worst.admitted_vs_ideal_most_pct);
            format!("{least:.1} to {most:.1}")
        },
    },
    Column {
        title: "worst keys %",
        figure: |figures| format!("{:.1}", figures.worst.worst_keys_vs_ideal_pct),
    },
    Column { title: "wrong denials %", figure: |it| format!("{:.2}", it.worst.wrong_denials_pct) },
    Column { title: "unsure %", figure: |it| format!("{:.1}", it.worst.unsure_pct) },
    Column { title: "waited %", figure: |it| format!("{:.1}", it.worst.waited_pct) },
    Column {
        title: "synced/tick",
        figure: |figures| format!("{:.2}", figures.worst.keys_synced_per_tick_and_node),
    },
    Column { title: "fair share %", figure: |it| format!("{:.0}", it.worst.least_fair_share_pct) },
];

/// All lines, the titles first.
pub(super) struct Table(Vec<Vec<String>>);

impl Table {
    pub(super) fn of(reports: &[Report]) -> Self {
        let titles = ["limit", "scenario", "policy", "missed"].map(str::to_owned);
        let faulty = reports.iter().any(|report| report.cell.load.scenario().has_faults());
        let rest = if faulty { &FAULT_COLUMNS[..] } else { &[] };
        let columns: Vec<&Column> = COLUMNS.iter().chain(rest).collect();
        let titles = titles.into_iter().chain(columns.iter().map(|it| it.title.to_owned()));
        let mut lines = vec![titles.collect()];
        let mut left: Vec<&Report> = reports.iter().collect();
        while let Some(&first) = left.first() {
            let (own, others): (Vec<&Report>, Vec<&Report>) =
                left.into_iter().partition(|report| is_of_one_line(first, report));
            lines.push(line(&own, &columns));
            left = others;
        }
        Self(lines)
    }
}

fn is_of_one_line(one: &Report, other: &Report) -> bool {
    let of = |report: &Report| (report.cell.quota, report.cell.load.line(), report.policy);
    of(one) == of(other)
}

/// The line of cells that differ in nodes and interval only.
fn line(reports: &[&Report], columns: &[&Column]) -> Vec<String> {
    let first = reports[0];
    let missed = reports.iter().filter(|report| !report.misses.is_empty()).count();
    let worst = reports.iter().fold(first.figures, |worst, report| worst.or(&report.figures));
    let mut line = vec![
        first.limit.clone(),
        first.cell.load.line().to_owned(),
        first.policy.name().to_owned(),
        format!("{missed} of {}", reports.len()),
    ];
    line.extend(columns.iter().map(|column| (column.figure)(&worst)));
    line
}

/// Titles that are names stand on the left, as do the names below them.
const NAMES: usize = 3;

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.0.first().map_or(0, Vec::len);
        let width = |column: usize| self.0.iter().map(|line| line[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (index, line) in self.0.iter().enumerate() {
            for (column, (text, &width)) in line.iter().zip(&widths).enumerate() {
                if column < NAMES {
                    write!(f, "| {text:<width$} ")?;
                } else {
                    write!(f, "| {text:>width$} ")?;
                }
            }
            writeln!(f, "|")?;
            if index == 0 {
                for (column, &width) in widths.iter().enumerate() {
                    let end = if column < NAMES { '-' } else { ':' };
                    write!(f, "|-{:-<width$}{end}", "")?;
                }
                writeln!(f, "|")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{reports, tests::options};
    use super::*;

    #[test]
    fn a_line_has_the_worst_of_all_cluster_sizes_and_intervals() {
        let flags = "--scenario under,herd --rate 20 --nodes 4,20 --interval 50ms --seeds 1";
        let reports = reports(&options(&format!("{flags} --policy default,write-behind"))).unwrap();
        let Table(lines) = Table::of(&reports);
        let names: Vec<String> = lines.iter().map(|line| line[1..3].join(" ")).collect();
        let expected = [
            "scenario policy",
            "under default",
            "under write-behind",
            "herd default",
            "herd write-behind",
        ];
        assert_eq!(names, expected);
        let of_herd =
            |report: &&Report| report.scenario == "herd" && report.policy.name() == "default";
        let most = reports.iter().filter(of_herd).map(|it| it.figures.worst.excess_tokens);
        assert_eq!(lines[3][4], format!("{:.2}", most.fold(0.0, f64::max)));
        assert!(lines[3][3].ends_with(" of 2"), "{}", lines[3][3]);
    }

    #[test]
    fn all_lines_are_of_one_width_with_a_rule_below_the_titles() {
        let reports = reports(&options("--scenario herd --rate 20 --nodes 4 --seeds 1")).unwrap();
        let text = Table::of(&reports).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(lines.iter().all(|line| line.matches('|').count() == 4 + COLUMNS.len() + 1));
        assert!(lines[1].starts_with("|---") && lines[1].ends_with("--:|"), "{text}");
    }
}
