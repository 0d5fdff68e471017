use tidegate::config::Config;
fn vars(name: &str) -> Option<String> {
    match name {
        "SHORT" => Some("short-hunter2"[..5].to_owned()),
        "REDIS_PASSWORD" => Some("hunter2@/".into()),
        _ => None,
    }
}
#[test]
fn dump() {
    let t = std::fs::read_to_string("/tmp/cases.txt").unwrap();
    let mut out = String::new();
    for case in t.split("== ").skip(1) {
        let (name, toml) = case.split_once('\n').unwrap();
        out += &format!("== {name}\n{toml}");
        match Config::from_toml_with(toml, vars) {
            Ok(c) => out += &format!("OK {:?}\n", c.warnings()),
            Err(e) => {
                for m in e.mistakes() {
                    out += &format!(
                        "-- {}:{} | {} | {} | {}\n",
                        m.line(),
                        m.column(),
                        m.field(),
                        m.value(),
                        m.remedy()
                    );
                }
            }
        }
    }
    std::fs::write("/tmp/out.txt", out).unwrap();
}
