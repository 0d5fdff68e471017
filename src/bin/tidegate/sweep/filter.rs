//! Which cells are asked for.

use tidegate::sim::sweep::Cell;

use super::{Options, SweepError, rate_name};

/// A flag that chooses cells.
struct Filter {
    flag: &'static str,
    wanted: Vec<String>,
    /// What the flag may call the cell by; the first is told when there is none that is wanted.
    names: fn(&Cell) -> Vec<String>,
}

impl Filter {
    fn keeps(&self, cell: &Cell) -> bool {
        (self.names)(cell).iter().any(|name| self.wanted.contains(name))
    }

    fn given(&self) -> String {
        format!("{} {}", self.flag, self.wanted.join(","))
    }

    /// Refuses a value that no cell has.
    fn validate(&self, cells: &[Cell]) -> Result<(), SweepError> {
        let mut known: Vec<String> = Vec::new();
        for cell in cells {
            let names = (self.names)(cell);
            if !known.contains(&names[0]) {
                known.extend(names.into_iter().take(1));
            }
        }
        let is_known = |value: &&String| {
            cells.iter().any(|cell| (self.names)(cell).iter().any(|name| name == *value))
        };
        match self.wanted.iter().find(|value| !is_known(value)) {
            Some(value) => Err(SweepError::NoCell {
                wanted: format!("{} {value}", self.flag),
                known: format!("there are {}", known.join(", ")),
            }),
            None => Ok(()),
        }
    }
}

/// Those of `cells` that the flags ask for.
pub(super) fn wanted(options: &Options, cells: &[Cell]) -> Result<Vec<Cell>, SweepError> {
    let mut filters = Vec::from(filters(options));
    filters.retain(|filter| !filter.wanted.is_empty());
    filters.iter().try_for_each(|filter| filter.validate(cells))?;
    let kept = |cell: &&Cell| filters.iter().all(|filter| filter.keeps(cell));
    let wanted: Vec<Cell> = cells.iter().filter(kept).copied().collect();
    if wanted.is_empty() {
        let given: Vec<String> = filters.iter().map(Filter::given).collect();
        return Err(SweepError::NoCell {
            wanted: given.join(" "),
            known: "some have one of these, none has all: see sweep --help".to_owned(),
        });
    }
    Ok(wanted)
}

fn filters(options: &Options) -> [Filter; 5] {
    let texts = |values: &[u16]| values.iter().map(u16::to_string).collect();
    [
        Filter {
            flag: "--scenario",
            wanted: options.scenario.clone(),
            names: |cell| {
                let load = cell.load;
                vec![load.row().to_owned(), load.line().to_owned(), load.name().into_owned()]
            },
        },
        Filter {
            flag: "--rate",
            wanted: options.rate.iter().map(ToString::to_string).collect(),
            names: |cell| vec![rate_name(&cell.quota)],
        },
        Filter {
            flag: "--burst",
            wanted: options.burst.iter().map(u64::to_string).collect(),
            names: |cell| vec![cell.quota.burst_tokens().to_string()],
        },
        Filter {
            flag: "--nodes",
            wanted: texts(&options.nodes),
            names: |cell| vec![cell.nodes.to_string()],
        },
        Filter {
            flag: "--interval",
            wanted: options.interval.iter().map(|interval| format!("{interval:?}")).collect(),
            names: |cell| vec![format!("{:?}", cell.interval)],
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::{quota_name, tests::options};

    #[test]
    fn a_rate_is_a_second_unless_it_says_otherwise() {
        let quotas = |flags: &str| {
            let cells = options(&format!("--scenario under {flags}")).cells().unwrap();
            let mut names: Vec<String> = cells.iter().map(|cell| quota_name(&cell.quota)).collect();
            names.dedup();
            names
        };
        assert_eq!(quotas("").len(), tidegate::sim::sweep::QUOTAS.len());
        assert_eq!(quotas("--rate 1000"), ["1000/s burst 1000", "1000/s burst 100"]);
        assert_eq!(quotas("--rate 1000/h"), ["1000/h burst 50"]);
        assert_eq!(quotas("--rate 100/s --burst 100"), ["100/s burst 100"]);
        assert_eq!(quotas("--burst 100").len(), 3);
    }

    #[test]
    fn flags_together_leave_the_cells_that_all_of_them_ask_for() {
        let cells = |flags: &str| options(flags).cells().unwrap();
        let some = cells("--scenario herd,outage --nodes 4,100 --interval 10ms,0.05s --rate 20");
        assert_eq!(some.len(), 2 * 2 * 2);
        assert!(some.iter().all(|cell| cell.nodes != 20 && cell.interval.as_millis() < 200));
        assert_eq!(cells("--scenario hot_set").len(), 1);
    }

    #[test]
    fn what_the_sweep_does_not_have_is_refused_by_flag_and_value() {
        let cases = [
            ("--rate 7 --burst 100", "--rate 7/s: no cell of the sweep: there are 10000/s, 1000/s"),
            ("--burst 0", "--burst 0: "),
            ("--nodes 4,0", "--nodes 0: no cell of the sweep: there are 4, 20, 100"),
            ("--interval 0ms", "--interval 0ns: no cell of the sweep: there are 10ms, 50ms"),
            ("--scenario hot_set --nodes 4", "--scenario hot_set --nodes 4: "),
        ];
        for (flags, expected) in cases {
            let refused = options(flags).cells().unwrap_err().to_string();
            assert!(refused.starts_with(expected), "{refused}");
        }
    }
}
