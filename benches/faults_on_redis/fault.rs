//! What befalls the server and the nodes while they are under load.

use std::fs;
use std::process::Command;
use std::time::Duration;

use crate::judge::Stretch;
use crate::node::now_ns;
use crate::redis_server::RedisServer;
use crate::{KEY, seconds_us};

/// The key of the server that moves its clock, in microseconds, in the runs with another clock.
pub(crate) const CLOCK_KEY: &str = "test:clock-offset-us";

/// What happens, over and over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    /// All memory goes, each second.
    Flush,
    /// The hot key's record goes, each second.
    Delete,
    /// The server is frozen for 2.1 s of every 3 s.
    Freeze,
    /// The server is killed twice, and comes back with the same old snapshot.
    OldSnapshot,
    /// A node is frozen for 3 s of every 6 s.
    FreezeNode,
    /// All connections are cut, twice a second.
    Cut,
    /// The server's clock goes back by so many seconds, and forth again.
    Clock(u64),
    /// Half of the nodes have another script.
    Mixed,
}

impl Fault {
    pub(crate) fn name(self) -> String {
        match self {
            Self::None => "quiet".into(),
            Self::Flush => "FLUSHALL each second".into(),
            Self::Delete => "DEL of the record each second".into(),
            Self::Freeze => "server frozen 2.1 s in 3 s".into(),
            Self::OldSnapshot => "killed twice, old snapshot".into(),
            Self::FreezeNode => "a node frozen 3 s in 6 s".into(),
            Self::Cut => "connections cut each 0.5 s".into(),
            Self::Clock(seconds) => format!("server's clock back {seconds} s"),
            Self::Mixed => "half with another script".into(),
        }
    }

    /// Whether every token spent is charged in the hot key's record at the end.
    pub(crate) fn keeps_memory(self) -> bool {
        !matches!(self, Self::Flush | Self::Delete | Self::OldSnapshot)
    }
}

/// What happened.
#[derive(Debug, Default)]
pub(crate) struct Happened {
    /// How often; records that were there to be deleted, for [`Fault::Delete`].
    pub(crate) times: u64,
    /// When the server did not answer.
    pub(crate) away: Vec<Stretch>,
}

/// Plays a fault on a server and nodes until the load is over.
pub(crate) struct Stage<'a> {
    pub(crate) server: &'a mut RedisServer,
    pub(crate) node_pid: u32,
    pub(crate) start_ns: u64,
    pub(crate) seconds: f64,
}

/// Seconds at which stretches begin: `first`, then each `every`, as long as a stretch of `length` is over by `end`.
fn stretches(first: f64, every: f64, length: f64, end: f64) -> impl Iterator<Item = f64> {
    (0..)
        .map(move |round| first + every * f64::from(round))
        .take_while(move |from| from + length <= end)
}

impl Stage<'_> {
    pub(crate) fn play(mut self, fault: Fault) -> Happened {
        let mut happened = Happened::default();
        match fault {
            Fault::None | Fault::Mixed => {}
            Fault::Flush => self.each(1.0, |stage| {
                stage.server.command(&["FLUSHALL"]);
                happened.times += 1;
            }),
            Fault::Delete => self.each(1.0, |stage| {
                for name in records(stage.server) {
                    happened.times += u64::from(stage.server.command(&["DEL", &name]) == "1");
                }
            }),
            Fault::Cut => self.each(0.5, |stage| {
                stage.server.command(&["CLIENT", "KILL", "TYPE", "normal"]);
                happened.times += 1;
            }),
            Fault::Freeze => {
                for from in stretches(0.9, 3.0, 2.1, self.seconds) {
                    self.wait(from);
                    self.server.stop();
                    let stopped_us = self.now_us();
                    self.wait(from + 2.1);
                    self.server.cont();
                    happened.away.push((stopped_us, self.now_us()));
                    happened.times += 1;
                }
            }
            Fault::FreezeNode => {
                for from in stretches(1.5, 6.0, 3.0, self.seconds) {
                    self.wait(from);
                    signal(self.node_pid, "STOP");
                    self.wait(from + 3.0);
                    signal(self.node_pid, "CONT");
                    happened.times += 1;
                }
            }
            Fault::OldSnapshot => self.old_snapshot(&mut happened),
            Fault::Clock(seconds) => {
                self.wait(0.2 * self.seconds);
                let back = format!("-{}", seconds * 1_000_000);
                self.server.command(&["SET", CLOCK_KEY, &back]);
                self.wait((0.2 * self.seconds + 10.0).min(0.6 * self.seconds));
                self.server.command(&["SET", CLOCK_KEY, "0"]);
                happened.times = 2;
            }
        }
        happened
    }

    fn old_snapshot(&mut self, happened: &mut Happened) {
        let file = self.server.directory().join("dump.rdb");
        self.wait(0.15 * self.seconds);
        let answer = self.server.command(&["SAVE"]);
        assert_eq!(answer, "OK", "SAVE");
        let old = fs::read(&file).expect("the snapshot was written");
        for part in [0.4, 0.7] {
            self.wait(part * self.seconds);
            self.server.kill();
            let killed_us = self.now_us();
            fs::write(&file, &old).expect("the server's folder is writable");
            self.server.restart();
            happened.away.push((killed_us, self.now_us()));
            happened.times += 1;
        }
    }

    fn each(&mut self, seconds: f64, mut act: impl FnMut(&mut Self)) {
        for round in 1.. {
            let at = seconds * f64::from(round) - 0.1;
            if at >= self.seconds {
                return;
            }
            self.wait(at);
            act(self);
        }
    }

    fn now_us(&self) -> u64 {
        now_ns().saturating_sub(self.start_ns) / 1000
    }

    /// Until so many seconds after the load began.
    fn wait(&self, seconds: f64) {
        // The load may not have begun yet.
        let until_ns = self.start_ns + 1000 * seconds_us(seconds);
        std::thread::sleep(Duration::from_nanos(until_ns.saturating_sub(now_ns())));
    }
}

/// The names of the hot key's records, whatever the layout's prefix.
pub(crate) fn records(server: &RedisServer) -> Vec<String> {
    let pattern = format!("*{KEY}*");
    let answer = server.command(&["SCAN", "0", "MATCH", &pattern, "COUNT", "100000"]);
    // The first line is the cursor: there are fewer names than the count.
    answer.lines().skip(1).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn signal(pid: u32, name: &str) {
    let status = Command::new("sh")
        .args(["-c", r#"kill -s "$0" "$1""#, name, &pid.to_string()])
        .status()
        .expect("a shell starts");
    assert!(status.success(), "SIG{name} to {pid}: {status}");
}
