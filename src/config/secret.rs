//! Secrets: variables in texts, and files.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The largest file of a secret, in bytes.
pub const SECRET_BYTES_MAX: u64 = 64 * 1024;

/// Why the variables of a text cannot be replaced.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Unset(String),
    /// `${` without a name and `}`.
    Unnamed,
    /// A dollar before anything else.
    Dollar,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unset(name) => write!(f, "the variable {name} is not set: set it to a text"),
            Self::Unnamed => {
                f.write_str("'${' begins no variable: write ${NAME}, or $$ for a dollar")
            }
            Self::Dollar => {
                f.write_str("a dollar stands alone: write $$ for a dollar, ${NAME} for a variable")
            }
        }
    }
}

/// The text with each `${NAME}` replaced and each `$$` as a dollar; and whether it had variables.
pub(super) fn expand(
    text: &str,
    variables: &dyn Fn(&str) -> Option<String>,
) -> Result<(String, bool), Vec<Fault>> {
    let (mut expanded, mut has_variables, mut faults) = (String::new(), false, Vec::new());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        if let Some(after) = after.strip_prefix('$') {
            expanded.push('$');
            rest = after;
        } else if let Some(after) = after.strip_prefix('{') {
            let Some((name, after)) = after.split_once('}').filter(|(name, _)| is_name(name))
            else {
                faults.push(Fault::Unnamed);
                rest = after;
                continue;
            };
            has_variables = true;
            match variables(name) {
                Some(value) => expanded.push_str(&value),
                None => faults.push(Fault::Unset(name.to_owned())),
            }
            rest = after;
        } else {
            faults.push(Fault::Dollar);
            rest = after;
        }
    }
    expanded.push_str(rest);
    if faults.is_empty() { Ok((expanded, has_variables)) } else { Err(faults) }
}

fn is_name(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !name.starts_with(|char: char| char.is_ascii_digit())
        && !name.is_empty()
        && name.bytes().all(is_part)
}

/// What a file has, without a newline at its end.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = read_at_most(path, SECRET_BYTES_MAX)?;
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
    }
    Ok(bytes)
}

/// What a file has, if that is not too much.
pub(super) fn read_at_most(path: &Path, max_bytes: u64) -> Result<Vec<u8>, String> {
    let cannot = |error: std::io::Error| format!("the file cannot be read: {error}");
    let file = File::open(path).map_err(cannot)?;
    let mut bytes = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > max_bytes {
        return Err(format!("the file is larger than {max_bytes} bytes: name another one"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_replaced_and_two_dollars_are_one() {
        let known = |name: &str| (name == "A_1").then(|| "x$$y${A_1}".to_owned());
        let expanded = |text| expand(text, &known);
        assert_eq!(expanded("plain"), Ok(("plain".to_owned(), false)));
        assert_eq!(expanded("<${A_1}>"), Ok(("<x$$y${A_1}>".to_owned(), true)), "replaced once");
        assert_eq!(expanded("$$$$ $${A_1}"), Ok(("$$ ${A_1}".to_owned(), false)));
    }

    #[test]
    fn each_fault_of_a_text_is_named() {
        let none = |_: &str| None;
        let faults = |text| expand(text, &none).unwrap_err();
        let unset = |name: &str| Fault::Unset(name.to_owned());
        assert_eq!(faults("${A}${B}"), [unset("A"), unset("B")]);
        assert_eq!(
            faults("$A ${ ${} ${1} ${a b} ${A"),
            [
                Fault::Dollar,
                Fault::Unnamed,
                Fault::Unnamed,
                Fault::Unnamed,
                Fault::Unnamed,
                Fault::Unnamed,
            ]
        );
        assert_eq!(faults("$"), [Fault::Dollar]);
    }
}
